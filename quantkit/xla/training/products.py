"""Linears over a mesh: the shardings of their inputs, outputs and weights, and their gradients.

B samples, T tokens, I inputs, O outputs, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor, nn

from quantkit.tensors.scheme import QuantScheme
from quantkit.xla.bridge import apply
from quantkit.xla.training.partitions import DATA, MODEL, DeviceMesh, Spec


@dataclass(frozen=True)
class Weight:
    """The sharding of a weight [O, I] on a mesh, and its products.

    Attributes:
        spec: the sharding of the stored weight.
        dtype: of the operands of products, and of the sums over devices. Sums within a device are
            float32.
        units: the number of parts of the outputs that must not be divided, such as heads; None if
            they can be divided anywhere.
    """

    mesh: DeviceMesh
    spec: Spec
    dtype: Any
    units: int | None = None

    @property
    def spec_without_data(self) -> Spec:
        """Return the sharding of the gathered weight, without the data axis."""
        return tuple(None if axis == DATA else axis for axis in self.spec)

    def product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Compute ``x @ weight.T``, [B, T, I] and [O, I] to [B, T, O]."""
        return self.forward(x, self.gather_weight(weight))

    def gather_weight(self, weight: jax.Array) -> jax.Array:
        """Round a weight to `dtype` and gather it along data."""
        return self.mesh.constrain(weight.astype(self.dtype), *self.spec_without_data)

    def multiply_quantized(
        self, x: jax.Array, scale: jax.Array, codes: jax.Array, zero: jax.Array | None
    ) -> jax.Array:
        """Compute ``x @ weight.T`` for ``weight = scale * (codes - zero)``, with gradients by x and
        by the scales. Devices do not exchange gradients by the weight.

        Args:
            scale: [O, G] float32.
            codes: [O, I] int4 or int8.
            zero: [O, G] int8, or None for zeros.
        """
        result: jax.Array = _multiply_quantized(self, x, scale, codes, zero)
        return result

    def forward(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Compute ``x @ weight.T`` for a gathered weight."""
        y = self._einsum("bti,oi->bto", self.inputs(x), weight)
        # If the devices do not divide the heads, each device gets all outputs: attention computes
        # complete heads.
        features: str | None = MODEL
        if self.units is not None and self.units % self.mesh.size(MODEL):
            features = None
        return self.mesh.constrain(y, self.mesh.samples, None, features)

    def by_inputs(self, gradient: jax.Array, weight: jax.Array) -> jax.Array:
        """Compute the gradient by inputs from that by outputs."""
        by_x = self._einsum("bto,oi->bti", gradient, weight)
        return self.mesh.constrain(by_x, self.mesh.samples, None, MODEL)

    def inputs(self, x: jax.Array) -> jax.Array:
        """Round inputs to `dtype`, sharded like the weight's columns."""
        return self.mesh.constrain(
            x.astype(self.dtype), self.mesh.samples, None, self.spec_without_data[1]
        )

    def outputs(self, y: jax.Array) -> jax.Array:
        """Round gradients by outputs to `dtype`, sharded like the weight's rows."""
        return self.mesh.constrain(
            y.astype(self.dtype), self.mesh.samples, None, self.spec_without_data[0]
        )

    def dequantize(
        self, scale: jax.Array, codes: jax.Array, zero: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Subtract zero points from codes, [O, G', I / G'] float32, and dequantize the weight
        [O, I]. The groups G' may be smaller than G.
        """
        # The codes are gathered instead of the weight, because they have fewer bits.
        codes = self.mesh.constrain(codes, *self.spec_without_data)
        times = self._cuts(codes.shape[1], scale.shape[1])
        units = codes.astype(jnp.float32).reshape(codes.shape[0], scale.shape[1] * times, -1)
        if zero is not None:
            units = units - self._steps(zero, times).astype(jnp.float32)
        floats = (units * self._steps(scale, times)).reshape(codes.shape).astype(self.dtype)
        return units, self.mesh.constrain(floats, *self.spec_without_data)

    def by_scale(
        self, x: jax.Array, gradient: jax.Array, units: jax.Array, groups: int
    ) -> jax.Array:
        """Compute the gradient by scales [O, G] from that by outputs. Each device sums the
        gradients of its own samples over the columns of a group, so that devices exchange only
        gradients of scales.
        """
        mesh = self.mesh
        rows, columns = self.spec_without_data

        def compute_local(x: jax.Array, gradient: jax.Array, units: jax.Array) -> jax.Array:
            by_weight = self._einsum("bto,bti->oi", gradient, x, jnp.float32)
            return lax.psum((by_weight.reshape(units.shape) * units).sum(-1), mesh.samples)

        inputs = (
            mesh.fitting((mesh.samples, None, columns), x.shape),
            mesh.fitting((mesh.samples, None, rows), gradient.shape),
            mesh.fitting((rows, columns, None), units.shape),
        )
        output = mesh.fitting((rows, columns), units.shape[:2])
        # Explicit shards, so that XLA does not exchange gradients by the weight.
        compute = jax.shard_map(
            compute_local, mesh=mesh.mesh, in_specs=inputs, out_specs=output, check_vma=False
        )
        by_scale = compute(x, gradient, units)
        # Parts of a group may be on several devices.
        if groups < units.shape[1]:
            by_scale = mesh.constrain(by_scale, rows, None)
            by_scale = by_scale.reshape(units.shape[0], groups, -1).sum(-1)
        return mesh.constrain(by_scale, *self.spec)

    def _einsum(
        self, equation: str, left: jax.Array, right: jax.Array, dtype: Any = None
    ) -> jax.Array:
        # By default, a TPU rounds the float32 inputs of products to bfloat16.
        exact = self.dtype == jnp.float32
        precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
        return jnp.einsum(
            equation, left, right, precision=precision, preferred_element_type=dtype or self.dtype
        )

    def _steps(self, array: jax.Array, times: int) -> jax.Array:
        """Repeat scales or zero points [O, G] for smaller groups, [O, G', 1]."""
        rows, columns = self.spec_without_data
        # Groups that span devices are gathered before they are repeated.
        gathered = self.mesh.constrain(array, rows, columns if times == 1 else None)
        return self.mesh.constrain(jnp.repeat(gathered, times, axis=1), rows, columns)[..., None]

    def _cuts(self, columns: int, groups: int) -> int:
        """Find the smallest number of parts of a group so that each device has complete parts."""
        parts = self.mesh.size(self.spec_without_data[1])
        # An axis that is not divisible is replicated, so each device has all groups.
        if columns % parts:
            return 1
        size = columns // groups
        times = 1
        # Ends at the latest with groups of one column.
        while size % times or groups * times % parts:
            times += 1
        return times


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_quantized(
    weight: Weight, x: jax.Array, scale: jax.Array, codes: jax.Array, zero: jax.Array | None
) -> jax.Array:
    _, floats = weight.dequantize(scale, codes, zero)
    return weight.forward(x, floats)


def _forward(
    weight: Weight, x: jax.Array, scale: jax.Array, codes: jax.Array, zero: jax.Array | None
) -> Any:
    return _multiply_quantized(weight, x, scale, codes, zero), (x, scale, codes, zero)


def _backward(weight: Weight, kept: Any, gradient: jax.Array) -> Any:
    x, scale, codes, zero = kept
    # Dequantized again: storing the floats of all weights would need more memory than the codes.
    units, floats = weight.dequantize(scale, codes, zero)
    gradient = weight.outputs(gradient)
    by_x = weight.by_inputs(gradient, floats).astype(x.dtype)
    by_scale = weight.by_scale(weight.inputs(x), gradient, units, scale.shape[1])
    # Codes and zero points are not trained.
    return by_x, by_scale, None, None


_multiply_quantized.defvjp(_forward, _backward)


class MeshLinear(nn.Module):
    """A linear over a mesh.

    Its arrays have the names `weight`, or `scale`, `codes` and possibly `zero`.
    """

    def __init__(self, weight: Weight, scheme: QuantScheme | None, bias: bool) -> None:
        super().__init__()
        self._weight = weight
        self._names: tuple[str, ...]
        if scheme is None:
            self._names = ("weight",)
        elif scheme.symmetric:
            self._names = ("scale", "codes")
        else:
            self._names = QUANTIZED
        # Placeholders: `bridge.run` replaces them by arrays with these names.
        for name in self._names:
            self.register_buffer(name, torch.empty(0, device="meta"))
        self.bias = nn.Parameter(torch.empty(0, device="meta")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, [B, T, I] to [B, T, O]."""
        arrays = [getattr(self, name) for name in self._names]
        out: Tensor = apply(self._product, x, self.bias, *arrays)
        return out

    def _product(self, x: jax.Array, bias: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        if len(arrays) == 1:
            out = self._weight.product(x, arrays[0])
        else:
            scale, codes, *zeros = arrays
            zero = zeros[0] if zeros else None
            out = self._weight.multiply_quantized(x, scale, codes, zero)
        if bias is None:
            return out
        return out + bias


QUANTIZED = ("scale", "codes", "zero")
"""The names of a quantized weight's arrays; only asymmetric schemes have the last one."""
