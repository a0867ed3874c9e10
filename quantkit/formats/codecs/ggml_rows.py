"""Rows of a GGUF tensor in any of ggml's types: as codes if the type has them, otherwise as floats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantkit.files.gguf_types import GgmlType
from quantkit.files.tensor_file import TensorFile, View
from quantkit.formats.codecs.ggml_blocks import BLOCK_TYPES
from quantkit.tensors.dtypes import DType
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.tensors.qtensor import QuantTensor

FLOATS = {GgmlType.F32: DType.FLOAT32, GgmlType.F16: DType.FLOAT16, GgmlType.BF16: DType.BFLOAT16}
"""Types of floats, which are read as they are stored."""
SMALL_FLOATS = frozenset({GgmlType.MXFP4, GgmlType.NVFP4})
"""Types of small floats with scales."""
EXACT = frozenset({
    GgmlType.Q4_0, GgmlType.Q5_0, GgmlType.Q8_0, GgmlType.Q3_K, GgmlType.Q6_K, GgmlType.IQ4_NL, GgmlType.IQ4_XS,
    GgmlType.TQ1_0, GgmlType.TQ2_0,
})  # fmt: skip
"""Types of integers times scales that are exact in float32: 11 bits of a float16, 7 of a scale's factor and 5 of a
code, or 7 of a code alone."""
NOT_READ = frozenset({
    GgmlType.Q8_1, GgmlType.Q8_K, GgmlType.Q1_0, GgmlType.I8, GgmlType.I16, GgmlType.I32, GgmlType.I64, GgmlType.F64,
})  # fmt: skip
"""Types that no published weights have: for activations, integers, and one that gguf cannot convert to floats."""
CHUNK_ELEMENTS = 1 << 21  # weights that are turned to floats at a time


@dataclass(frozen=True)
class GgmlRows:
    """A tensor's rows in a file.

    Attributes:
        view: bytes [O, N] of complete blocks.
        coded: whether to read codes, of a type that has some.
        dtype: of the floats.
    """

    file: TensorFile
    view: View
    type: GgmlType
    coded: bool
    dtype: DType

    def decode(self, raw: object, spec: TensorSpec, part: TensorSlice | None = None) -> QuantTensor | Tensor:
        """The weight [O, I], or some of its rows or columns, of which no other rows are read.

        Raises:
            RequestError: for codes of columns that cut a group; see `QuantTensor.columns`.
            CheckpointError: see `TensorFile.read`.
        """
        return self._codes(part) if self.coded else self._floats(part)

    def _codes(self, part: TensorSlice | None) -> QuantTensor | Tensor:
        """Codes; of columns, complete blocks are read."""
        blocks = BLOCK_TYPES[self.type]
        if part is None or part.axis == 0:
            return blocks.decode(self.file.read_view(self.view, part))
        first, stop, inside = self._blocks_of(part)
        found = blocks.decode(self.file.read_view(self.view.narrow(1, first, stop - first)))
        return found.columns(*inside)

    def _floats(self, part: TensorSlice | None) -> Tensor:
        """Floats, computed in float32 for a few rows at a time and rounded once."""
        view, inside = self.view, None
        if part is not None and part.axis == 1:
            first, stop, inside = self._blocks_of(part)
            view = view.narrow(1, first, stop - first)
        rows = TensorSlice(0, ((0, view.shape[0]),)) if part is None or part.axis == 1 else part
        columns = view.shape[1] // self.type.block_bytes * self.type.block
        left, right = (0, columns) if inside is None else inside
        target = self.dtype.empty((rows.size, right - left))
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, rows.size, step):
            stop = min(start + step, rows.size)
            raw = self.file.read_view(view, rows.rows(start, stop))
            target[start:stop] = dequantized(raw, self.type)[:, left:right]
        return target

    def _blocks_of(self, part: TensorSlice) -> tuple[int, int, tuple[int, int]]:
        """The bytes of the blocks of a row that have some columns, and the columns within them."""
        ((start, stop),) = part.ranges
        first, last = start // self.type.block, -(-stop // self.type.block)
        before = first * self.type.block
        return first * self.type.block_bytes, last * self.type.block_bytes, (start - before, stop - before)

    def of_expert(self, expert: int) -> GgmlRows:
        """The rows of one expert out of bytes [E, O, N]."""
        return replace(self, view=self.view.at(0, expert))


def dequantized(rows: Tensor, kind: GgmlType) -> Tensor:
    """Rows of blocks, bytes [O, N], in float32, computed by the gguf package."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # later checks find what is not finite
        return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind.value]))
