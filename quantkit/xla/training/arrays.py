"""The arrays of a model over a mesh, from a checkpoint, or without weights for a plan."""

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
        tensors: the checkpoint's, one for each layer of the segment; a single one that is not in a
            layer.
        kind: ``scale``, ``codes`` or ``zero`` of a quantized weight; None for floats.
        shape: the segment's layers included.
        spec: where its last axes lie.
    """

    key: str
    tensors: tuple[str, ...]
    kind: str | None
    shape: tuple[int, ...]
    dtype: Any
    spec: Spec
    stacked: bool

    def read(self, checkpoint: Checkpoint, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Return a part of it."""
        if not self.stacked:
            return _numpy(self._of(checkpoint.load(self.tensors[0]))[index], self.dtype)
        layers = range(len(self.tensors))[index[0]]
        found = []
        for layer in layers:
            found.append(self._of(checkpoint.load(self.tensors[layer]))[index[1:]])
        return _numpy(torch.stack(found), self.dtype)

    def _of(self, value: Tensor | QuantTensor) -> Tensor:
        if self.kind is None:
            if isinstance(value, QuantTensor):
                return value.dequantize()
            return value
        assert isinstance(value, QuantTensor)
        if self.kind == "scale":
            return value.scale
        middle = value.scheme.levels // 2
        if self.kind == "codes":
            return (value.codes.short() - middle).char()
        assert value.zero is not None
        return (value.zero.short() - middle).char()


def leaves(checkpoint: Checkpoint) -> list[Leaf]:
    """Return the arrays of a model; quantized embeddings and heads are floats. Raises
    `UnsupportedError` as `require_trainable`.
    """
    require_trainable(checkpoint)
    config = checkpoint.config
    found = schemes(checkpoint)
    by_layer: dict[int | None, list[Parameter]] = {}
    for parameter in parameters(config):
        by_layer.setdefault(parameter.layer, []).append(parameter)
    out: list[Leaf] = []
    for index, layers in enumerate(segments(config, found)):
        for parameter in by_layer[layers.start]:
            name = parameter.name.removeprefix(BLOCK_PREFIX.format(layers.start))
            names = tuple(BLOCK_PREFIX.format(layer) + name for layer in layers)
            out += _of_parameter(
                checkpoint, parameter, f"{index}.{name}", names, found.get(parameter.module), True
            )
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
        yield Leaf(
            key,
            names,
            None,
            (*before, *parameter.shape),
            _dtype(checkpoint, names, floats=True),
            spec,
            stacked,
        )
        return
    rows, columns = parameter.shape
    steps = (*before, rows, scheme.groups(columns))
    module = key.removesuffix(".weight")
    yield Leaf(f"{module}.scale", names, "scale", steps, _dtype(checkpoint, names), spec, stacked)
    if scheme.bits == 4:
        codes = jnp.int4
    else:
        codes = jnp.int8
    yield Leaf(f"{module}.codes", names, "codes", (*before, rows, columns), codes, spec, stacked)
    if not scheme.symmetric:
        yield Leaf(f"{module}.zero", names, "zero", steps, jnp.int8, spec, stacked)


def _dtype(checkpoint: Checkpoint, names: tuple[str, ...], *, floats: bool = False) -> Any:
    """Return the type of scales that several tensors have, or of their values as floats.

    Raises:
        UnsupportedError: if they differ.
    """
    found = set()
    for one in map(checkpoint.info, names):
        found.add(DType.FLOAT32 if floats and one.scheme else one.dtype)
    if len(found) > 1:
        raise UnsupportedError(
            f"tensors like '{names[0]}' have several types",
            path=checkpoint.path,
            found=" and ".join(sorted(one.value for one in found)),
            expected="one type in all layers",
        )
    return jax_dtype(found.pop().torch)


def load_arrays(
    checkpoint: Checkpoint, mesh: DeviceMesh, *, only: str | None = None
) -> dict[str, jax.Array]:
    """Return a checkpoint's arrays on the devices of this process, or one of them; each device's
    part is read by itself.
    """
    result: dict[str, jax.Array] = {}
    for leaf in leaves(checkpoint):
        if only in (None, leaf.key):
            read = partial(leaf.read, checkpoint)
            result[leaf.key] = jax.make_array_from_callback(
                leaf.shape, mesh.sharding(leaf.spec, leaf.shape), read
            )
    if only is None:
        result |= {name: mesh.put(value.numpy()) for name, value in _rotary(checkpoint).items()}
    return result


def abstract_arrays(checkpoint: Checkpoint, mesh: DeviceMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return what `load_arrays` gives, without weights."""
    found = {}
    for leaf in leaves(checkpoint):
        found[leaf.key] = mesh.abstract(leaf.shape, leaf.dtype, leaf.spec)
    rotary = _rotary(checkpoint)
    return found | {
        name: mesh.abstract(tuple(one.shape), jax_dtype(one.dtype), ())
        for name, one in rotary.items()
    }


def _rotary(checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, value in Rotary(checkpoint.config).named_buffers():
        result[ROTARY + name] = value
    return result


def _numpy(value: Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    value = value.contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy().astype(dtype, copy=False)
