"""Weights in small floats with scales, FP8 and MXFP4: read only, as floats; the latter also as
codes, for formats that have them.

FP8: a tensor ``T`` of float8 [..., O, I] has its scales in ``T_scale_inv`` or ``T_scale``: one for
the whole tensor (or matrix), one for each row, or one for each block of rows and columns; ``w = q *
scale`` whatever the name. Scales are floats, or exponents of two (float8_e8m0fnu, or its bytes).
Sources: DeepSeek-V3's inference code, transformers' finegrained_fp8, compressed-tensors'
float-quantized.

MXFP4, of gpt-oss's experts: ``T_blocks`` uint8 [..., O, I / 32, 16] holds two codes e2m1 a byte,
the low half first, ``T_scales`` uint8 [..., O, I / 32] the exponents of two of each 32 of them,
plus 127. In float folders of these models ``T`` is [E, I, O]: inputs come before outputs. Sources:
OCP Microscaling Formats 1.0, transformers' mxfp4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quantkit.errors import UnsupportedError
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.layouts import BLOCKS
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import MXFP4
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

SUFFIXES = ("_scale_inv", "_scale")
_SCALES = (*FLOATS, DType.FLOAT8_E8M0FNU, DType.UINT8)
# The positive values of e2m1, MXFP4's codes.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127
# The exponent of e8m0 that is NaN, and beyond float32's.
_NO_NUMBER = 255
# The bytes of the codes of MXFP4 that share a scale, two codes in each.
_BYTES = 16
# The groups of MXFP4 that are dequantized at a time.
_SCALES_AT_ONCE = 1 << 14


class DequantizedTensor(TensorFile):
    """A tensor that is read as floats, in the form of a file with nothing else.

    Attributes:
        kind: of its codes, for messages.
        stored_as: see `TensorSpec`.
        tensor: the floats.
        parts: the tensors on disk, the codes first.
    """

    kind: str
    stored_as: str | None = None

    def __init__(
        self, tensor: StoredTensor, parts: Sequence[StoredTensor], homes: Mapping[str, TensorFile]
    ) -> None:
        """
        Args:
            homes: the files of the parts, by name; others may be among them.
        """
        super().__init__(homes[parts[0].name].source, {})
        self.tensor = tensor
        self.parts = parts
        self._homes = homes
        self.tensors = {tensor.name: tensor}

    @property
    def nbytes(self) -> int:
        """Return the size on disk, with the scales."""
        return sum(part.nbytes for part in self.parts)

    def floats(self, part: TensorSlice | None) -> torch.Tensor:
        """Dequantize the tensor, or a part of it."""
        raise NotImplementedError

    def _read(self, stored: StoredTensor, part: TensorSlice | None = None) -> torch.Tensor:
        return self._homes[stored.name].read(stored.name, part)

    def read(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        return self.floats(part)

    def decode(self, raw: object, spec: object, part: TensorSlice | None = None) -> torch.Tensor:
        """Do as `read`, with the arguments of a codec."""
        return self.floats(part)

    def read_bytes(self, name: str, part: TensorSlice | None = None) -> bytes:
        return self.floats(part).view(-1).view(DType.UINT8.torch).numpy().tobytes()

    def row_parts(self, name: str) -> Iterator[TensorSlice]:
        yield TensorSlice(0, ((0, self.tensor.shape[0]),))


class Float8Weight(DequantizedTensor):
    """A tensor of float8 and its scales."""

    kind = "FP8"

    def __init__(
        self,
        weight: StoredTensor,
        scale: StoredTensor,
        homes: Mapping[str, TensorFile],
        block: tuple[int, int] | None,
        dtype: DType,
        *,
        by_columns: bool = False,
    ) -> None:
        """
        Args:
            block: rows and columns of a block, if the config states them.
            by_columns: whether scales are for columns [E, 1, O] or [E, O, 1], as those of fbgemm's
                experts.

        Raises:
            UnsupportedError: if the shape or type of the scales does not fit the weight.
        """
        super().__init__(StoredTensor(weight.name, dtype, weight.shape), (weight, scale), homes)
        self._grid, self._block = _grid(
            weight, scale, block, homes[scale.name].path, by_columns=by_columns
        )

    def floats(self, part: TensorSlice | None) -> torch.Tensor:
        weight, scale = self.parts
        codes = self._read(weight, part)
        stored = self._read(scale)
        # Bytes are biased exponents, as float8_e8m0fnu is, which torch converts itself.
        scales = decode_exponents(stored) if scale.dtype == DType.UINT8 else stored.float()
        scales = scales.reshape(self._grid)
        if len(weight.shape) > 2 and part is not None and part.axis == 0:
            # A part of stacked matrices selects the scales of these, with all rows and columns.
            scales = part.of(scales)
            part = None
        # The row and the column of the grid in which the scale of each row and column is.
        row_indices = _indices(weight.shape, -2, part)
        column_indices = _indices(weight.shape, -1, part)
        rows = torch.div(row_indices, self._block[0], rounding_mode="floor")
        columns = torch.div(column_indices, self._block[1], rounding_mode="floor")
        out = self.tensor.dtype.empty(codes.shape)
        code_matrices = codes.view(-1, *codes.shape[-2:])
        targets = out.view(-1, *out.shape[-2:])
        grids = scales.view(-1, *scales.shape[-2:])
        for index, (matrix, target) in enumerate(zip(code_matrices, targets, strict=True)):
            column_scales = grids[index][:, columns]
            # A few rows at a time in float32 bound the memory; each weight is rounded once.
            for start, stop in qtensor.row_chunks(*matrix.shape):
                target[start:stop] = matrix[start:stop].float() * column_scales[rows[start:stop]]
        return out


def _grid(
    weight: StoredTensor,
    scale: StoredTensor,
    block: tuple[int, int] | None,
    path: Path,
    *,
    by_columns: bool,
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Derive the shape [..., R, C] of the scales, and the rows and columns that share one."""
    *lead, rows, columns = weight.shape
    if by_columns:
        if scale.dtype in _SCALES and scale.shape in ((*lead, 1, columns), (*lead, columns, 1)):
            return (*lead, 1, columns), (rows, 1)
    elif scale.dtype in _SCALES:
        has_one_scale = math.prod(scale.shape) == 1 and math.prod(lead) == 1
        if has_one_scale or (lead and scale.shape in ((*lead, 1, 1), tuple(lead))):
            return (*lead, 1, 1), (rows, columns)
        if scale.shape in ((*lead, rows, 1), (*lead, rows)):
            return (*lead, rows, 1), (1, columns)
        is_grid = scale.shape[:-2] == tuple(lead) and len(scale.shape) == len(weight.shape)
        if is_grid and 0 not in scale.shape:
            grid_rows, grid_columns = scale.shape[-2:]
            if block is None:
                # Without a statement, blocks must fill the weight: only then their size is certain.
                if not rows % grid_rows and not columns % grid_columns:
                    return scale.shape, (rows // grid_rows, columns // grid_columns)
            elif (-(-rows // block[0]), -(-columns // block[1])) == (grid_rows, grid_columns):
                return scale.shape, block
    if block is None:
        size = ""
    else:
        size = f" in blocks of {block[0]} x {block[1]}"
    raise UnsupportedError(
        f"the scales of '{weight.name}' do not match its shape",
        path=path,
        found=f"{scale.dtype} {list(scale.shape)}",
        expected=f"one for the tensor, one a row, or a grid, of {list(weight.shape)}{size}",
    )


def _indices(shape: tuple[int, ...], axis: int, part: TensorSlice | None) -> torch.Tensor:
    """List the indices of a part of a tensor along an axis."""
    if part is None or part.axis != len(shape) + axis:
        return torch.arange(shape[axis])
    return torch.cat([torch.arange(start, stop) for start, stop in part.ranges])


def decode_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Compute powers of two, float32, from their biased exponents, uint8; infinity for 255."""
    return (exponents.float() - EXPONENT_BIAS).exp2()


def encode_exponents(powers: torch.Tensor) -> torch.Tensor:
    """Undo `decode_exponents`, of powers in any float type."""
    # `frexp` has mantissas in [0.5, 1), so 2 ** k has the exponent k + 1; of infinity it has none.
    exponents = torch.frexp(powers.float()).exponent
    biased = exponents - 1 + EXPONENT_BIAS
    return torch.where(powers.isinf(), _NO_NUMBER, biased).to(torch.uint8)


class Mxfp4Weight(DequantizedTensor):
    """Stacked experts in MXFP4, as floats [E, I, O]."""

    kind = "MXFP4"

    def __init__(
        self,
        blocks: StoredTensor,
        scales: StoredTensor,
        homes: Mapping[str, TensorFile],
        dtype: DType,
    ) -> None:
        """Raises `UnsupportedError` if codes and scales do not fit together."""
        is_stack = len(blocks.shape) == 4 and blocks.shape[-1] == _BYTES
        if not is_stack or scales.shape != blocks.shape[:-1]:
            raise UnsupportedError(
                f"the scales of '{blocks.name}' do not match its shape",
                path=homes[blocks.name].path,
                found=list(scales.shape),
                expected=(
                    f"[experts, rows, groups] of {list(blocks.shape)}, each group of {_BYTES} bytes"
                ),
            )
        experts, rows, groups, _ = blocks.shape
        shape = (experts, groups * 2 * _BYTES, rows)
        super().__init__(
            StoredTensor(blocks.name.removesuffix(BLOCKS), dtype, shape), (blocks, scales), homes
        )

    def read_parts(self, experts: TensorSlice | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the codes and the exponents of some experts as they are stored; None for all."""
        return self._read(self.parts[0], experts), self._read(self.parts[1], experts)

    def floats(self, part: TensorSlice | None) -> torch.Tensor:
        """Dequantize the experts of the part; no others are read."""
        of_experts = part if part is not None and part.axis == 0 else None
        blocks, scales = self.read_parts(of_experts)
        out = self.tensor.dtype.empty((len(blocks), *self.tensor.shape[1:]))
        # In float folders of these models, inputs come before outputs.
        for expert, target in enumerate(out):
            target.copy_(dequantize(blocks[expert], scales[expert], self.tensor.dtype).t())
        if part is of_experts or part is None:
            return out
        return part.of(out).contiguous()


class Mxfp4Codes:
    """Reads stacked experts in MXFP4 as codes, one expert at a time; see `ReadCodec`."""

    scheme = MXFP4

    def __init__(self, weight: Mxfp4Weight) -> None:
        self._weight = weight

    def spec(self, raw: object, expected: TensorSpec) -> TensorSpec:
        return TensorSpec(expected.name, expected.shape, expected.dtype, self.scheme)

    def parts(self, raw: object, spec: TensorSpec) -> list[StoredTensor]:
        return list(self._weight.parts)

    def decode(
        self, raw: object, spec: TensorSpec, part: TensorSlice | None = None
    ) -> qtensor.QuantTensor:
        """Read the codes [O, I] of the one expert that `part` selects."""
        assert part is not None
        assert (part.axis, part.size) == (0, 1)
        blocks, scales = self._weight.read_parts(part)
        codes = unpack_halves(blocks[0]).flatten(1)
        return qtensor.QuantTensor(codes, decode_exponents(scales[0]), None, self.scheme)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Dequantize codes [..., O, I / 32, 16] and exponents [..., O, I / 32] of MXFP4 to floats
    [..., O, I].
    """
    # The highest bit of a code is its sign.
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    codes = blocks.reshape(-1, _BYTES)
    exponents = scales.reshape(-1)
    out = dtype.empty((len(codes), 2 * _BYTES))
    for start, stop in qtensor.row_chunks(len(codes), 1, _SCALES_AT_ONCE):
        halves = unpack_halves(codes[start:stop]).int()
        out[start:stop] = values[halves] * decode_exponents(exponents[start:stop]).unsqueeze(-1)
    return out.view(*blocks.shape[:-2], -1)


def unpack_halves(data: torch.Tensor) -> torch.Tensor:
    """Unpack codes [..., 2 N] from bytes [..., N] with two each, the low half first."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
