"""How compressed-tensors stores one linear: ``pack-quantized``, which quantkit writes and vLLM and
transformers read, and ``int-quantized``, for products with activations in int8.

``pack-quantized``: ``weight_packed`` int32 [O, ceil(I * bits / 32)], ``weight_scale`` [O, G],
``weight_shape`` int64 [2] and, if asymmetric, ``weight_zero_point`` packed along the outputs, int32
[ceil(O * bits / 32), G]. Codes are unsigned, least significant bits first. ``int-quantized``:
``weight`` int8 [O, I], ``weight_scale`` and, if asymmetric, ``weight_zero_point`` int8 [O, G], all
signed. Also read: one scale for a whole weight, zero points in int8 along with packed codes, zero
points of zero along with symmetric ones, and ``weight_g_idx`` [I], the group of each column, from
before compressed-tensors 0.20; if groups are not of adjacent columns, the weight is read as floats.
Source: the compressed-tensors package's compressors.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import DAMAGED_FILE, GroupedCodec, RawModule, Weight
from quantkit.formats.codecs.layout import Layout, Shape, Shapes, words
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

PACKED = "weight_packed"
SHAPE = "weight_shape"
GLOBAL_SCALE = "weight_global_scale"
PLAIN = "weight"
SCALE = "weight_scale"
_ZERO = "weight_zero_point"
_GROUPS = "weight_g_idx"
_INDEX = {DType.INT32: "i", DType.INT64: "q"}


def _compute_packed_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    if group_size is None:
        one_scale = [(1,), ()]
    else:
        one_scale = []
    return {
        PACKED: [(rows, words(columns, bits))],
        SCALE: [(rows, groups), *one_scale],
        SHAPE: [(2,)],
        _ZERO: [
            (words(rows, bits), groups),
            (rows, groups),
            *one_scale,
        ],  # in bytes before version 0.9
        _GROUPS: [(columns,)],
    }


def _plain_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    if group_size is None:
        one_scale = [(1,), (), (rows,)]
    else:
        one_scale = []
    scales = [(rows, groups), *one_scale]
    return {PLAIN: [(rows, columns)], SCALE: scales, _ZERO: scales, _GROUPS: [(columns,)]}


def _fp4_shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    return {PACKED: [(rows, columns // 2)], SCALE: [(rows, groups)], GLOBAL_SCALE: [(1,), ()]}


PACKED_CODES = Layout(
    "packed integers of compressed-tensors",
    PACKED,
    (SCALE,),
    ((SHAPE,),),
    if_asymmetric=(_ZERO,),
    zeros=_ZERO,
    floats=(SCALE,),
    integers=(PACKED, SHAPE, _ZERO, _GROUPS),
    shapes=_compute_packed_shapes,
)
FP4 = Layout(
    "packed small floats of compressed-tensors",
    PACKED,
    (SCALE,),
    code_types=(DType.UINT8,),
    bits=4,
    optional_suffixes=(GLOBAL_SCALE, "input_global_scale"),
    shapes=_fp4_shapes,
)
INT8 = Layout(
    "int8",
    PLAIN,
    (SCALE, "weight_scale_inv"),
    code_types=(DType.INT8,),
    bits=8,
    floats=(SCALE,),
    integers=(_ZERO, _GROUPS),
    shapes=_plain_shapes,
    unpacked=True,
    excluded="SCB",
)


@dataclass(frozen=True)
class CompressedLinear(GroupedCodec):
    """What both forms share: scales and zero points, and the groups of columns.

    Attributes:
        one_scale: whether all rows share one.
        by_index: whether the config says that there is a group for each column.
    """

    scheme: QuantScheme
    one_scale: bool = False
    by_index: bool = False

    layout: ClassVar[Layout]
    code_type: ClassVar[DType]

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        found = raw.find(self.layout.codes)
        scale = raw.find(SCALE)
        scheme = self.scheme
        if found is None or scale is None:
            raise raw.make_damage_error(
                f"the config quantizes '{raw.name}', but its codes or scales are missing"
            )
        if scale.dtype not in FLOATS:
            raise raw.make_damage_error(f"the scales of '{raw.name}' are no floats", scale.dtype)
        shape = (found.shape[0] if found.shape else expected.shape[0], expected.shape[1])
        if shape[1] % (scheme.group_size or 1):
            raise raw.make_unsupported_error(
                f"group size of '{raw.name}' does not divide its row", scheme
            )
        zero = raw.find(_ZERO)
        if scheme.symmetric and zero is not None and any(raw.read_bytes(_ZERO)):
            raise raw.make_damage_error(
                f"the config calls '{raw.name}' symmetric, but it has zero points",
                f"{zero.dtype} {list(zero.shape)}",
            )
        if self._in_order(raw, shape[1]):
            return TensorSpec(expected.name, shape, scale.dtype, scheme)
        return TensorSpec(
            expected.name, shape, expected.dtype, None, "compressed-tensors with act-order"
        )

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        dtypes = {self.layout.codes: self.code_type, SCALE: spec.dtype}
        if self.layout is PACKED_CODES:
            dtypes |= {SHAPE: DType.INT64}
        else:
            dtypes |= {}
        if self.scheme.symmetric:
            dtypes |= {}
        else:
            dtypes |= {_ZERO: self.code_type}
        return self.layout.list_stored_tensors(
            spec, self.scheme.bits, self.scheme.group_size, dtypes
        )

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        """In one of the forms that are read."""
        stored = self.list_stored_tensors(spec)
        found = []
        if self.one_scale:
            shapes = [(1,), (1, 1), ()]
        else:
            shapes = [stored[1].shape]
        for tensor in stored:
            there = raw.find(tensor.name.removeprefix(f"{raw.name}."))
            forms = [(tensor.dtype, tensor.shape)]
            if tensor.name.endswith(SCALE) and there is not None:
                tensor = StoredTensor(tensor.name, there.dtype, shapes[0])
                forms = [(there.dtype, shape) for shape in shapes]
            elif tensor.name.endswith(_ZERO):
                forms += [(DType.INT8, shape) for shape in shapes]
            found.append(
                there if there is not None and (there.dtype, there.shape) in forms else tensor
            )
        others = (raw.find(_GROUPS), raw.find(_ZERO) if self.scheme.symmetric else None)
        return [*found, *(tensor for tensor in others if tensor is not None)]

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        codes = self.codes(raw, spec, rows, columns)
        (start, stop) = columns
        scale = self.whole_rows(raw.read(SCALE), spec, rows)
        zero = None
        if not self.scheme.symmetric and raw.find(_ZERO) is not None:
            zero = self.zero_points(raw, spec, rows)
        if spec.scheme is None:
            return self._by_index(raw, spec, codes, scale, zero, start)
        if (size := self.scheme.group_size) is not None:
            groups = slice(start // size, -(-stop // size))
            scale = scale[:, groups]
            zero = None if zero is None else zero[:, groups]
        return qtensor.QuantTensor(codes, scale, zero, self.scheme)

    def codes(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> torch.Tensor:
        """Unsigned codes [R, C]."""
        raise NotImplementedError

    def zero_points(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None
    ) -> torch.Tensor:
        """Zero points [R, G] in bytes."""
        return self.whole_rows(self.to_unsigned(raw, raw.read(_ZERO)), spec, rows)

    def whole_rows(
        self, value: torch.Tensor, spec: TensorSpec, part: TensorSlice | None
    ) -> torch.Tensor:
        """Return one value for each group [O, G] of some rows; a single value is repeated."""
        rows = spec.shape[0]
        groups = self.scheme.groups(spec.shape[1])
        if value.numel() == 1:
            found = value.reshape(1, 1).expand(rows, 1)
        else:
            found = value.reshape(rows, groups)
        return (found if part is None else part.of(found)).contiguous()

    def to_unsigned(self, raw: RawModule, signed: torch.Tensor) -> torch.Tensor:
        """Unsigned codes or zero points from signed ones; any outside the scheme raises
        `CheckpointError`.
        """
        if self.scheme.bits == 8:
            return signed.view(torch.uint8) ^ 128
        half = self.scheme.levels // 2
        if signed.numel() and not -half <= int(signed.min()) <= int(signed.max()) < half:
            found = f"{int(signed.min())} to {int(signed.max())}"
            raise raw.make_damage_error(
                f"'{raw.name}' has codes outside its scheme", found, f"{-half} to {half - 1}"
            )
        return (signed + half).view(torch.uint8)

    def _in_order(self, raw: RawModule, columns: int) -> bool:
        """Return whether groups are of adjacent columns, by a tensor if there is one."""
        index = raw.find(_GROUPS)
        groups = self.scheme.groups(columns)
        if index is None and self.by_index:
            raise raw.make_damage_error(
                f"the config says that '{raw.name}' has a group for each column, but '{_GROUPS}' is"
                " missing",
                hint=DAMAGED_FILE,
            )
        if index is None:
            return True
        found: tuple[int, ...] = ()
        if index.dtype in _INDEX and index.shape == (columns,):
            found = struct.unpack(f"<{columns}{_INDEX[index.dtype]}", raw.read_bytes(_GROUPS))
        if found == (-1,) * columns:  # made, and never filled
            return True
        if not found or min(found) < 0 or max(found) >= groups:
            raise raw.make_damage_error(
                f"tensor '{raw.name}.{_GROUPS}' does not say the group of each column",
                f"{index.dtype} {list(index.shape)}",
                f"[{columns}], each below {groups}",
            )
        return found == tuple(column * groups // columns for column in range(columns))

    def _by_index(
        self,
        raw: RawModule,
        spec: TensorSpec,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        start: int,
    ) -> torch.Tensor:
        """Return the floats of columns from `start` on, each with the scale and zero point of its
        group.
        """
        index = raw.read(_GROUPS)[start : start + codes.shape[1]].long()
        out = spec.dtype.empty(codes.shape)
        for first, last in qtensor.row_chunks(*codes.shape):
            offset = self.scheme.levels // 2 if zero is None else zero[first:last].float()[:, index]
            out[first:last] = (codes[first:last].float() - offset) * scale[first:last].float()[
                :, index
            ]
        return out


class PackQuantized(CompressedLinear):
    """Codes packed into words."""

    layout = PACKED_CODES
    code_type = DType.INT32

    def unit(self, raw: RawModule, spec: TensorSpec) -> int:
        return self.scheme.group_size or 32 // self.scheme.bits  # groups are whole words

    def codes(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> torch.Tensor:
        (first, last), bits = columns, self.scheme.bits
        if (shape := raw.read(SHAPE).tolist()) != list(spec.shape):
            raise raw.make_damage_error(
                f"tensor '{raw.name}.{SHAPE}' disagrees with the config", shape, list(spec.shape)
            )
        part = self.columns_slice(
            rows, first * bits // 32, words(last, bits), words(spec.shape[1], bits)
        )
        return qtensor.unpack_int32(raw.read(PACKED, part), bits, last - first)

    def zero_points(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None
    ) -> torch.Tensor:
        stored = raw.read(_ZERO)
        if DType.of(stored.dtype) == DType.INT8:
            return self.whole_rows(self.to_unsigned(raw, stored), spec, rows)
        zero = qtensor.unpack_int32(stored.t(), self.scheme.bits, spec.shape[0]).t()
        return (zero if rows is None else rows.of(zero)).contiguous()

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor]:
        bits = value.scheme.bits
        tensors = [
            qtensor.pack_int32(value.codes, bits),
            value.scale.contiguous(),
            torch.tensor(value.shape),
        ]
        if value.zero is not None:
            tensors.append(qtensor.pack_int32(value.zero.t(), bits).t().contiguous())
        return tensors


class IntQuantized(CompressedLinear):
    """Codes as signed bytes."""

    layout = INT8
    code_type = DType.INT8

    def unit(self, raw: RawModule, spec: TensorSpec) -> int:
        if spec.scheme is None:
            return 1
        return self.scheme.group_size or 1

    def codes(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> torch.Tensor:
        return self.to_unsigned(
            raw, raw.read(PLAIN, self.columns_slice(rows, *columns, spec.shape[1]))
        )

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor]:
        half = self.scheme.levels // 2
        if value.zero is None:
            stored = [value.codes]
        else:
            stored = [value.codes, value.zero]
        codes, *zero = ((one.to(torch.int16) - half).to(torch.int8).contiguous() for one in stored)
        return [codes, value.scale.contiguous(), *zero]
