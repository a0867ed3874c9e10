"""Weights of 8-bit floats with scales: read only, as floats.

A tensor ``T`` of float8 [..., O, I] has its scales in ``T_scale_inv`` or ``T_scale``: one for the whole
tensor (or matrix), one for each row, or one for each block of rows and columns; ``w = q * scale`` whatever the name.
Scales are floats, or exponents of two (float8_e8m0fnu, or its bytes).
Sources: DeepSeek-V3's inference code, transformers' finegrained_fp8, compressed-tensors' float-quantized.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.layout import Layout, Shape, Shapes
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

TYPES = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ)
SUFFIXES = ("_scale_inv", "_scale")
_SCALES = (*FLOATS, DType.FLOAT8_E8M0FNU, DType.UINT8)


def _shapes(rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None) -> Shapes:
    one_scale = [(1,), ()] if group_size is None else []
    scales: list[Shape] = [(rows, 1), (rows,), *one_scale]
    if block is not None:
        scales = [(math.ceil(rows / block[0]), math.ceil(columns / block[1]))]
    return {"weight": [(rows, columns)], "weight_scale_inv": scales, "weight_scale": scales}


FLOAT8 = Layout(
    "FP8", "weight", ("weight_scale", "weight_scale_inv"), code_types=TYPES, bits=8, shapes=_shapes, unpacked=True
)
_BIAS = 127  # of exponents
_CHUNK = 1 << 20


class Float8Weight:
    """A tensor of float8 and its scales, read as floats."""

    kind = "FP8"

    def __init__(
        self, weight: StoredTensor, scale: StoredTensor, homes: tuple[TensorFile, TensorFile],
        block: tuple[int, int] | None, dtype: DType, *, by_columns: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            homes: the files that hold the weight and the scales.
            block: rows and columns of a block, if the config states them.
            dtype: of the floats.
            by_columns: whether scales are for columns [E, 1, O] or [E, O, 1], as those of fbgemm's experts.

        Raises:
            UnsupportedError: if the shape or type of the scales does not fit the weight.
        """
        self.tensor = StoredTensor(weight.name, dtype, weight.shape)
        self.parts = (weight, scale)
        self._homes = homes
        self._grid, self._block = _grid(weight, scale, block, homes[1].path, by_columns=by_columns)

    def read(self, part: TensorSlice | None) -> Tensor:
        """The floats, or a part of them."""
        import torch

        weight, scale = self.parts
        codes = self._homes[0].read(weight.name, part)
        scales = _floats(self._homes[1].read(scale.name)).reshape(self._grid)
        if len(weight.shape) > 2 and part is not None and part.axis == 0:
            scales = part.of(scales)
            part = None
        rows, columns = (
            torch.div(_indices(weight.shape, axis, part), size, rounding_mode="floor")
            for axis, size in ((-2, self._block[0]), (-1, self._block[1]))
        )
        out = self.tensor.dtype.empty(codes.shape)
        count = codes.shape[-2]
        matrices = zip(codes.view(-1, *codes.shape[-2:]), out.view(-1, *out.shape[-2:]), strict=True)
        for index, (matrix, target) in enumerate(matrices):
            own = scales.view(-1, *scales.shape[-2:])[index][:, columns]
            step = max(1, _CHUNK // max(1, codes.shape[-1]))
            for start in range(0, count, step):
                stop = min(start + step, count)
                target[start:stop] = matrix[start:stop].float() * own[rows[start:stop]]
        return out


def _grid(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None, path: Path, *, by_columns: bool
) -> tuple[tuple[int, ...], tuple[int, int]]:  # fmt: skip
    """The shape [..., R, C] of the scales, and the rows and columns that share one."""
    *lead, rows, columns = weight.shape
    if by_columns:
        if scale.dtype in _SCALES and scale.shape in ((*lead, 1, columns), (*lead, columns, 1)):
            return (*lead, 1, columns), (max(rows, 1), 1)
    elif scale.dtype in _SCALES:
        if math.prod(scale.shape) == 1 and math.prod(lead) == 1:
            return (*lead, 1, 1), (max(rows, 1), max(columns, 1))
        if scale.shape in ((*lead, 1, 1), tuple(lead)) and lead:
            return (*lead, 1, 1), (max(rows, 1), max(columns, 1))
        if scale.shape in ((*lead, rows, 1), (*lead, rows)):
            return (*lead, rows, 1), (1, max(columns, 1))
        if scale.shape[:-2] == tuple(lead) and len(scale.shape) == len(weight.shape) and 0 not in scale.shape:
            high, wide = scale.shape[-2:]
            if block is not None and (-(-rows // block[0]), -(-columns // block[1])) == (high, wide):
                return scale.shape, block
            if block is None and not rows % high and not columns % wide:
                return scale.shape, (rows // high, columns // wide)
    size = "" if block is None else f" in blocks of {block[0]} x {block[1]}"
    raise UnsupportedError(
        f"the scales of '{weight.name}' do not fit it", path=path, found=f"{scale.dtype} {list(scale.shape)}",
        expected=f"one for the tensor, one a row, or a grid, of {list(weight.shape)}{size}",
    )  # fmt: skip


def _indices(shape: tuple[int, ...], axis: int, part: TensorSlice | None) -> Tensor:
    """The indices of a part of a tensor along an axis."""
    import torch

    if part is None or part.axis != len(shape) + axis:
        return torch.arange(shape[axis])
    return torch.cat([torch.arange(start, stop) for start, stop in part.ranges])


def _floats(scale: Tensor) -> Tensor:
    if DType.of(scale.dtype) == DType.UINT8:
        return (scale.float() - _BIAS).exp2()
    return scale.float()
