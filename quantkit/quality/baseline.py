"""The RTN baseline: what rounding to nearest makes of a model. The gate holds results against it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.files.source import SourceFile
from quantkit.formats.checkpoint import Checkpoint
from quantkit.quality.transcoded import equal_as_numbers, row_pieces
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import ROUNDING, QuantTensor, quantize_rtn
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_COARSEST = 128


def rtn_baseline(
    source: Checkpoint, assigned: Mapping[str, QuantScheme], scale_dtype: DType | None = None
) -> RtnCheckpoint:
    """The source rounded in the schemes given by module, but int4 never in groups longer than 128.

    Args:
        scale_dtype: of its scales; None is the source's.
    """

    def fine(module: str, scheme: QuantScheme) -> QuantScheme:
        coarse = scheme.bits == 4 and (scheme.group_size is None or scheme.group_size > _COARSEST)
        columns = source.info(module + ".weight").shape[1]
        return QuantScheme(4, _COARSEST, scheme.symmetric).fitted(columns) if coarse else scheme

    return RtnCheckpoint(source, {module: fine(module, scheme) for module, scheme in assigned.items()}, scale_dtype)


class RtnCheckpoint:
    """A float checkpoint as it would be with some layers rounded to nearest, computed as it is read."""

    def __init__(
        self, source: Checkpoint, assigned: Mapping[str, QuantScheme], scale_dtype: DType | None = None
    ) -> None:
        """
        Args:
            assigned: the scheme of each module to round.
            scale_dtype: of its scales; None is the source's.
        """
        self._source = source
        self._assigned = assigned
        self._scale_dtype = scale_dtype or DType(source.config.dtype)
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

    It is where the records say that every quantized layer was only rounded, and every tensor, as it is read back, has
    the numbers that rounding the source gives.

    Args:
        records: what the manifest says of tensors, by name.
    """
    if baseline.config.differences(result.config) or baseline.names() != result.names():
        return False
    for name in result.names():
        own, expected = result.info(name), baseline.info(name)
        if own.shape != expected.shape or (own.scheme is None) != (expected.scheme is None):
            return False
        record = records.get(name) or {}
        if own.scheme is not None and (record.get("solver") != ROUNDING or "fallback" in record):
            return False
    return all(
        _same_numbers(result.load(name, rows), baseline.load(name, rows))
        for name in result.names()
        for rows in row_pieces(result.info(name).shape, result.config.head_dim)
    )


def _same_numbers(a: Tensor | QuantTensor, b: Tensor | QuantTensor) -> bool:
    if isinstance(a, QuantTensor) and isinstance(b, QuantTensor):
        return equal_as_numbers(a, b)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a.float(), b.float())
