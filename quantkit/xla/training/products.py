"""Linears over a mesh: where their inputs, outputs and weights lie, and their gradients.

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
    """How a weight [O, I] lies on a mesh, and how it is multiplied.

    Attributes:
        spec: as it is stored.
        dtype: of products' operands, and of what devices add up; each device's own sums are
            float32.
        units: of outputs that stay together, such as heads; None for outputs that can be split
            anywhere.
    """

    mesh: DeviceMesh
    spec: Spec
    dtype: Any
    units: int | None = None

    @property
    def spec_without_data(self) -> Spec:
        """As it is used: whole along data."""
        return tuple(None if axis == DATA else axis for axis in self.spec)

    def product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """``x @ weight.T``, [B, T, I] and [O, I] to [B, T, O]."""
        return self.forward(x, self.gather_weight(weight))

    def gather_weight(self, weight: jax.Array) -> jax.Array:
        """Return a weight as it is used: rounded, and gathered along data."""
        return self.mesh.constrain(weight.astype(self.dtype), *self.spec_without_data)

    def multiply_quantized(
        self, x: jax.Array, scale: jax.Array, codes: jax.Array, zero: jax.Array | None
    ) -> jax.Array:
        """``x @ weight.T`` for ``weight = scale * (codes - zero)``. It has gradients by x and by
        the scales; for these, devices exchange no gradient by the weight.

        Args:
            scale: [O, G] float32.
            codes: [O, I] int4 or int8.
            zero: [O, G] int8, or None for zeros.
        """
        result: jax.Array = _multiply_quantized(self, x, scale, codes, zero)
        return result

    def forward(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """``x @ weight.T`` for a weight as it is used."""
        y = self._einsum("bti,oi->bto", self.inputs(x), weight)
        whole = self.units is not None and self.units % self.mesh.size(MODEL)
        return self.mesh.constrain(y, self.mesh.samples, None, None if whole else MODEL)

    def by_inputs(self, gradient: jax.Array, weight: jax.Array) -> jax.Array:
        """Return the gradient by inputs, given that by outputs."""
        found = self._einsum("bto,oi->bti", gradient, weight)
        return self.mesh.constrain(found, self.mesh.samples, None, MODEL)

    def inputs(self, x: jax.Array) -> jax.Array:
        """Inputs as they are multiplied: all of them where a device has some of the outputs."""
        return self.mesh.constrain(
            x.astype(self.dtype), self.mesh.samples, None, self.spec_without_data[1]
        )

    def outputs(self, y: jax.Array) -> jax.Array:
        """Return the gradients by outputs, as they are multiplied: all of them where a device has
        some of the inputs.
        """
        return self.mesh.constrain(
            y.astype(self.dtype), self.mesh.samples, None, self.spec_without_data[0]
        )

    def dequantize(
        self, scale: jax.Array, codes: jax.Array, zero: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Codes less zero points [O, G', I / G'] float32, and the weight [O, I]; there may be
        smaller groups.
        """
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
        """Return the gradient by scales [O, G], given that by outputs. Each device adds up over the
        columns of a group what its own samples give, so that devices exchange scales alone.
        """
        mesh = self.mesh
        (rows, columns) = self.spec_without_data

        def compute_local(x: jax.Array, gradient: jax.Array, units: jax.Array) -> jax.Array:
            by_weight = self._einsum("bto,bti->oi", gradient, x, jnp.float32)
            return lax.psum((by_weight.reshape(units.shape) * units).sum(-1), mesh.samples)

        inputs = (
            mesh.fitting((mesh.samples, None, columns), x.shape),
            mesh.fitting((mesh.samples, None, rows), gradient.shape),
            mesh.fitting((rows, columns, None), units.shape),
        )
        output = mesh.fitting((rows, columns), units.shape[:2])
        found = jax.shard_map(
            compute_local, mesh=mesh.mesh, in_specs=inputs, out_specs=output, check_vma=False
        )(x, gradient, units)
        # Parts of a group may be on several devices.
        if groups < units.shape[1]:
            found = mesh.constrain(found, rows, None).reshape(units.shape[0], groups, -1).sum(-1)
        return mesh.constrain(found, *self.spec)

    def _einsum(
        self, equation: str, left: jax.Array, right: jax.Array, dtype: Any = None
    ) -> jax.Array:
        if self.dtype == jnp.float32:
            precision = lax.Precision.HIGHEST
        else:
            precision = lax.Precision.DEFAULT
        return jnp.einsum(
            equation, left, right, precision=precision, preferred_element_type=dtype or self.dtype
        )

    def _steps(self, array: jax.Array, times: int) -> jax.Array:
        """Scales or zero points [O, G] of smaller groups, [O, G', 1]."""
        rows, columns = self.spec_without_data
        whole = self.mesh.constrain(array, rows, columns if times == 1 else None)
        return self.mesh.constrain(jnp.repeat(whole, times, axis=1), rows, columns)[..., None]

    def _cuts(self, columns: int, groups: int) -> int:
        """Into how many smaller ones groups are cut so that each device of a model has whole
        ones.
        """
        parts = self.mesh.size(self.spec_without_data[1])
        # Then all devices have all of it.
        if columns % parts:
            return 1
        size = columns // groups
        return next(
            times
            for times in range(1, size + 1)
            if size % times == 0 and groups * times % parts == 0
        )


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
    units, floats = weight.dequantize(scale, codes, zero)
    gradient = weight.outputs(gradient)
    by_x = weight.by_inputs(gradient, floats).astype(x.dtype)
    return by_x, weight.by_scale(weight.inputs(x), gradient, units, scale.shape[1]), None, None


_multiply_quantized.defvjp(_forward, _backward)


class MeshLinear(nn.Module):
    """A linear over a mesh.

    Its arrays are named `weight`, or `scale`, `codes` and perhaps `zero`.
    """

    def __init__(self, weight: Weight, scheme: QuantScheme | None, bias: bool) -> None:
        super().__init__()
        self._weight = weight
        self._names = (
            ("weight",) if scheme is None else ("scale", "codes") if scheme.symmetric else QUANTIZED
        )
        for name in self._names:
            self.register_buffer(name, torch.empty(0, device="meta"))
        self.bias = nn.Parameter(torch.empty(0, device="meta")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, I] to [B, T, O]."""
        out: Tensor = apply(
            self._product, x, self.bias, *(getattr(self, name) for name in self._names)
        )
        return out

    def _product(self, x: jax.Array, bias: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        if len(arrays) == 1:
            out = self._weight.product(x, arrays[0])
        else:
            out = self._weight.multiply_quantized(
                x, arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else None
            )
        if bias is None:
            return out
        return out + bias


QUANTIZED = ("scale", "codes", "zero")
"""The names of a quantized weight's arrays; the last one only where it has zero points."""
