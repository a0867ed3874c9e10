"""Make the arrays of a model over a mesh, from a checkpoint, or without weights for a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from quantkit.architectures.topology import Parameter, parameters
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.model.load import BLOCK_PREFIX
from quantkit.model.rope import Rotary
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.xla.split import require_trainable
from quantkit.xla.training.model import ROTARY, segments
from quantkit.xla.training.partitions import DeviceMesh, Spec, parameter_spec
from quantkit.xla.weights import jax_dtype


@dataclass(frozen=True)
class Leaf:
    """An array of a model.

    Attributes:
        key: its name in `Arrays`.
        tensors: names in the checkpoint, one for each layer of the segment, or only one outside
            the layers.
        kind: ``scale``, ``codes`` or ``zero`` of a quantized weight; None for floats.
        shape: with the segment's layers as first axis, if `stacked`.
        spec: of the last axes.
        stacked: whether the array has the layers of a segment.
    """

    key: str
    tensors: tuple[str, ...]
    kind: str | None
    shape: tuple[int, ...]
    dtype: Any
    spec: Spec
    stacked: bool

    def read(self, checkpoint: Checkpoint, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Read a part of the array from the checkpoint."""
        if not self.stacked:
            return _numpy(self._of(checkpoint.load(self.tensors[0]))[index], self.dtype)
        parts: list[Tensor] = []
        for name in self.tensors[index[0]]:
            parts.append(self._of(checkpoint.load(name))[index[1:]])
        return _numpy(torch.stack(parts), self.dtype)

    def _of(self, value: Tensor | QuantTensor) -> Tensor:
        if self.kind is None:
            if isinstance(value, QuantTensor):
                return value.dequantize()
            return value
        assert isinstance(value, QuantTensor)
        if self.kind == "scale":
            return value.scale
        # Unsigned codes become signed: XLA has signed int4 and int8.
        middle = value.scheme.levels // 2
        if self.kind == "codes":
            return (value.codes.short() - middle).char()
        assert value.zero is not None
        return (value.zero.short() - middle).char()


def leaves(checkpoint: Checkpoint) -> list[Leaf]:
    """List the arrays of a model; quantized embeddings and heads become floats. Raises
    `UnsupportedError` as `require_trainable`.
    """
    require_trainable(checkpoint)
    config = checkpoint.config
    scheme_by_module = schemes(checkpoint)
    by_layer: dict[int | None, list[Parameter]] = {}
    for parameter in parameters(config):
        by_layer.setdefault(parameter.layer, []).append(parameter)
    out: list[Leaf] = []
    for index, layers in enumerate(segments(config, scheme_by_module)):
        # All layers of a segment have the parameters of the first.
        for parameter in by_layer[layers.start]:
            name = parameter.name.removeprefix(BLOCK_PREFIX.format(layers.start))
            names = tuple(BLOCK_PREFIX.format(layer) + name for layer in layers)
            scheme = scheme_by_module.get(parameter.module)
            out += _of_parameter(checkpoint, parameter, f"{index}.{name}", names, scheme, True)
    for parameter in by_layer[None]:
        out += _of_parameter(checkpoint, parameter, parameter.name, (parameter.name,), None, False)
    return out


def _of_parameter(
    checkpoint: Checkpoint,
    parameter: Parameter,
    key: str,
    names: tuple[str, ...],
    scheme: QuantScheme | None,
    stacked: bool,
) -> Iterator[Leaf]:
    spec = parameter_spec(parameter)
    before = (len(names),) if stacked else ()
    if scheme is None or not parameter.is_linear_weight:
        shape = (*before, *parameter.shape)
        dtype = _dtype(checkpoint, names, floats=True)
        yield Leaf(key, names, None, shape, dtype, spec, stacked)
        return
    rows, columns = parameter.shape
    steps = (*before, rows, scheme.groups(columns))
    module = key.removesuffix(".weight")
    yield Leaf(f"{module}.scale", names, "scale", steps, _dtype(checkpoint, names), spec, stacked)
    codes = jnp.int4 if scheme.bits == 4 else jnp.int8
    yield Leaf(f"{module}.codes", names, "codes", (*before, rows, columns), codes, spec, stacked)
    if not scheme.symmetric:
        yield Leaf(f"{module}.zero", names, "zero", steps, jnp.int8, spec, stacked)


def _dtype(checkpoint: Checkpoint, names: tuple[str, ...], *, floats: bool = False) -> Any:
    """Find the common dtype of the scales of several tensors, or of their values as floats.

    Raises:
        UnsupportedError: if they differ.
    """
    dtypes: set[DType] = set()
    for name in names:
        spec = checkpoint.info(name)
        # Codes are dequantized to float32.
        dtypes.add(DType.FLOAT32 if floats and spec.scheme else spec.dtype)
    if len(dtypes) > 1:
        raise UnsupportedError(
            f"tensors like '{names[0]}' have several types",
            path=checkpoint.path,
            found=" and ".join(sorted(dtype.value for dtype in dtypes)),
            expected="one type in all layers",
        )
    return jax_dtype(dtypes.pop().torch)


def load_arrays(
    checkpoint: Checkpoint, mesh: DeviceMesh, *, only: str | None = None
) -> dict[str, jax.Array]:
    """Load a checkpoint's arrays, or only one of them, to the devices of this process. The shard of
    each device is read separately.
    """
    result: dict[str, jax.Array] = {}
    for leaf in leaves(checkpoint):
        if only in (None, leaf.key):
            # JAX calls `read` with the index of each shard on this process's devices.
            read = partial(leaf.read, checkpoint)
            sharding = mesh.sharding(leaf.spec, leaf.shape)
            result[leaf.key] = jax.make_array_from_callback(leaf.shape, sharding, read)
    if only is None:
        for name, value in _rotary(checkpoint).items():
            result[name] = mesh.put(value.numpy())
    return result


def abstract_arrays(checkpoint: Checkpoint, mesh: DeviceMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of `load_arrays` without weights."""
    arrays: dict[str, jax.ShapeDtypeStruct] = {}
    for leaf in leaves(checkpoint):
        arrays[leaf.key] = mesh.abstract(leaf.shape, leaf.dtype, leaf.spec)
    for name, value in _rotary(checkpoint).items():
        arrays[name] = mesh.abstract(tuple(value.shape), jax_dtype(value.dtype), ())
    return arrays


def _rotary(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, value in Rotary(checkpoint.config).named_buffers():
        result[ROTARY + name] = value
    return result


def _numpy(value: Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    value = value.contiguous()
    # torch cannot convert bfloat16 to NumPy, which has no such type of its own.
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy().astype(dtype, copy=False)
