"""The RTN baseline: what rounding to nearest makes of a model. The gate holds results against it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.files.source import SourceFile
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import ROUNDING, QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_COARSEST = 128
_AT_ONCE = 1 << 23  # values that are compared at a time


def rtn_baseline(source: Checkpoint, assigned: Mapping[str, QuantScheme]) -> RtnCheckpoint:
    """The source rounded in the schemes given by module, but int4 never in groups longer than 128."""

    def fine(module: str, scheme: QuantScheme) -> QuantScheme:
        coarse = scheme.bits == 4 and (scheme.group_size is None or scheme.group_size > _COARSEST)
        columns = source.info(module + ".weight").shape[1]
        return QuantScheme(4, _COARSEST, scheme.symmetric).fitted(columns) if coarse else scheme

    return RtnCheckpoint(source, {module: fine(module, scheme) for module, scheme in assigned.items()})


class RtnCheckpoint:
    """A float checkpoint as it would be with some layers rounded to nearest, computed as it is read."""

    def __init__(self, source: Checkpoint, assigned: Mapping[str, QuantScheme]) -> None:
        """
        Args:
            assigned: the scheme of each module to round.
        """
        self._source = source
        self._assigned = assigned
        self._scale_dtype = DType(source.config.dtype)
        self.path, self.format, self.config = source.path, source.format, source.config
        self.extra_config, self.notes = source.extra_config, source.notes

    def names(self) -> list[str]:
        return self._source.names()

    def info(self, name: str) -> TensorSpec:
        info, scheme = self._source.info(name), self._assigned.get(name.removesuffix(".weight"))
        return TensorSpec(name, info.shape, info.dtype if scheme is None else self._scale_dtype, scheme)

    def load(self, name: str, part: TensorSlice | None = None) -> Tensor | QuantTensor:
        scheme = self._assigned.get(name.removesuffix(".weight"))
        if scheme is None:
            return self._source.load(name, part)
        by_rows = part is None or part.axis == 0  # whose groups are the same ones
        value = self._source.load(name, part if by_rows else None)
        if isinstance(value, Tensor):
            value = quantize_rtn(value, scheme, self._scale_dtype.torch)
        return value if part is None or by_rows else part.of_weight(value)

    def files(self) -> list[SourceFile]:
        return self._source.files()


def is_baseline(result: Checkpoint, baseline: Checkpoint, records: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a result is its own baseline, so that running both would give the same figures twice.

    It is where the records say that every quantized layer was only rounded, all tensors agree in scheme and dtype,
    and every tensor, as it is read back, has the bits that rounding the source gives.

    Args:
        records: what the manifest says of tensors, by name.
    """
    if baseline.config.differences(result.config) or baseline.names() != result.names():
        return False
    for name in result.names():
        own, expected = result.info(name), baseline.info(name)
        if (own.shape, own.dtype, own.scheme) != (expected.shape, expected.dtype, expected.scheme):
            return False
        record = records.get(name) or {}
        if own.scheme is not None and (record.get("solver") != ROUNDING or "fallback" in record):
            return False
    return all(
        _same_bits(result.load(name, rows), baseline.load(name, rows))
        for name in result.names()
        for rows in _pieces(result.info(name).shape, result.config.head_dim)
    )


def _pieces(shape: tuple[int, ...], head_dim: int) -> Iterator[TensorSlice]:
    """Rows of a tensor, some at a time; whole heads, as readers of rotary rows require."""
    step = max(1, _AT_ONCE // (math.prod(shape[1:]) * head_dim)) * head_dim
    for start in range(0, shape[0], step):
        yield TensorSlice(0, ((start, min(start + step, shape[0])),))


def _same_bits(a: Tensor | QuantTensor, b: Tensor | QuantTensor) -> bool:
    if isinstance(a, QuantTensor) and isinstance(b, QuantTensor):
        zeros = [one.zero for one in (a, b) if one.zero is not None]
        same_zeros = not zeros or (len(zeros) == 2 and torch.equal(*zeros))
        return a.scheme == b.scheme and torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale) and same_zeros
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
