"""One linear of compressed-tensors: ``pack-quantized``, which quantkit writes and vLLM and
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

import struct
from dataclasses import dataclass
from typing import ClassVar

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import DAMAGED_FILE, GroupedCodec, Weight
from quantkit.formats.codecs.layout import Layout, count_words
from quantkit.formats.codecs.layouts import (
    GROUPS,
    INT8,
    PACKED,
    PACKED_CODES,
    PLAIN,
    SCALE,
    SHAPE,
    ZERO_POINT,
)
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

# The types that the group of each column may have, and their letters in `struct`.
_INDEX = {DType.INT32: "i", DType.INT64: "q"}


@dataclass(frozen=True)
class CompressedLinear(GroupedCodec):
    """The scales, zero points and groups of columns of both forms.

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
        codes = raw.find(self.layout.codes)
        scale = raw.find(SCALE)
        scheme = self.scheme
        if codes is None or scale is None:
            raise raw.make_damage_error(
                f"the config quantizes '{raw.name}', but its quantized weights or scales are"
                " missing"
            )
        if scale.dtype not in FLOATS:
            raise raw.make_damage_error(
                f"the scales of '{raw.name}' are not stored in a float type", scale.dtype
            )
        # Packed codes do not show how many columns there are.
        rows = codes.shape[0] if codes.shape else expected.shape[0]
        shape = (rows, expected.shape[1])
        if shape[1] % (scheme.group_size or 1):
            raise raw.make_unsupported_error(
                f"group size of '{raw.name}' does not divide its row", scheme
            )
        # Some writers add zero points of 0 to symmetric codes; these change nothing.
        zero = raw.find(ZERO_POINT)
        if scheme.symmetric and zero is not None and any(raw.read_bytes(ZERO_POINT)):
            raise raw.make_damage_error(
                f"the config calls '{raw.name}' symmetric, but it has zero points",
                f"{zero.dtype} {list(zero.shape)}",
            )
        if self._in_order(raw, shape[1]):
            return TensorSpec(expected.name, shape, scale.dtype, scheme)
        return TensorSpec(
            name=expected.name,
            shape=shape,
            dtype=expected.dtype,
            scheme=None,
            stored_as="compressed-tensors with act-order",
        )

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        dtypes = {self.layout.codes: self.code_type, SCALE: spec.dtype}
        if self.layout is PACKED_CODES:
            dtypes[SHAPE] = DType.INT64
        if not self.scheme.symmetric:
            dtypes[ZERO_POINT] = self.code_type
        return self.layout.list_stored_tensors(
            spec, self.scheme.bits, self.scheme.group_size, dtypes
        )

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        """List the tensors in one of the forms that are read."""
        stored = self.list_stored_tensors(spec)
        parts: list[StoredTensor] = []
        if self.one_scale:
            shapes = [(1,), (1, 1), ()]
        else:
            shapes = [stored[1].shape]
        for tensor in stored:
            on_disk = raw.find(tensor.name.removeprefix(f"{raw.name}."))
            forms = [(tensor.dtype, tensor.shape)]
            if tensor.name.endswith(SCALE) and on_disk is not None:
                # Scales may have any float type.
                tensor = StoredTensor(tensor.name, on_disk.dtype, shapes[0])
                forms = [(on_disk.dtype, shape) for shape in shapes]
            elif tensor.name.endswith(ZERO_POINT):
                for shape in shapes:
                    forms.append((DType.INT8, shape))
            # A tensor in no form that is read is listed in the form that is written: the caller
            # compares it with the header, and names what differs.
            if on_disk is not None and (on_disk.dtype, on_disk.shape) in forms:
                parts.append(on_disk)
            else:
                parts.append(tensor)
        optional = [raw.find(GROUPS)]
        if self.scheme.symmetric:
            optional.append(raw.find(ZERO_POINT))
        for part in optional:
            if part is not None:
                parts.append(part)
        return parts

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        codes = self.codes(raw, spec, rows, columns)
        start = columns[0]
        stop = columns[1]
        scale = self.whole_rows(raw.read(SCALE), spec, rows)
        zero = None
        if not self.scheme.symmetric and raw.find(ZERO_POINT) is not None:
            zero = self.zero_points(raw, spec, rows)
        if spec.scheme is None:
            return self._by_index(raw, spec, codes, scale, zero, start)
        size = self.scheme.group_size
        if size is not None:
            groups = slice(start // size, -(-stop // size))
            scale = scale[:, groups]
            if zero is not None:
                zero = zero[:, groups]
        return qtensor.QuantTensor(codes, scale, zero, self.scheme)

    def codes(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> torch.Tensor:
        """Read unsigned codes [R, C]."""
        raise NotImplementedError

    def zero_points(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None
    ) -> torch.Tensor:
        """Read zero points [R, G] in bytes."""
        return self.whole_rows(self.to_unsigned(raw, raw.read(ZERO_POINT)), spec, rows)

    def whole_rows(
        self, value: torch.Tensor, spec: TensorSpec, part: TensorSlice | None
    ) -> torch.Tensor:
        """Expand values to one for each group [O, G] of some rows; a single value is repeated."""
        rows = spec.shape[0]
        groups = self.scheme.groups(spec.shape[1])
        if value.numel() == 1:
            values = value.reshape(1, 1).expand(rows, 1)
        else:
            values = value.reshape(rows, groups)
        if part is not None:
            values = part.of(values)
        return values.contiguous()

    def to_unsigned(self, raw: RawModule, signed: torch.Tensor) -> torch.Tensor:
        """Convert signed codes or zero points to unsigned ones; any outside the scheme raises
        `CheckpointError`.
        """
        # A byte in two's complement becomes unsigned, with an offset of 128, by its highest bit.
        if self.scheme.bits == 8:
            return signed.view(torch.uint8) ^ 128
        half = self.scheme.levels // 2
        if signed.numel() and not -half <= int(signed.min()) <= int(signed.max()) < half:
            raise raw.make_damage_error(
                f"'{raw.name}' has values outside the range of its scheme",
                f"{int(signed.min())} to {int(signed.max())}",
                f"{-half} to {half - 1}",
            )
        return (signed + half).view(torch.uint8)

    def _in_order(self, raw: RawModule, columns: int) -> bool:
        """Check whether groups are of adjacent columns, by a tensor if there is one."""
        index = raw.find(GROUPS)
        groups = self.scheme.groups(columns)
        if index is None and self.by_index:
            raise raw.make_damage_error(
                f"the config says that '{raw.name}' has a group for each column, but '{GROUPS}' is"
                " missing",
                hint=DAMAGED_FILE,
            )
        if index is None:
            return True
        column_groups: tuple[int, ...] = ()
        if index.dtype in _INDEX and index.shape == (columns,):
            letter = _INDEX[index.dtype]
            column_groups = struct.unpack(f"<{columns}{letter}", raw.read_bytes(GROUPS))
        # Writers that do not reorder columns may create the tensor with -1 and never fill it.
        if column_groups == (-1,) * columns:
            return True
        if not column_groups or min(column_groups) < 0 or max(column_groups) >= groups:
            raise raw.make_damage_error(
                f"tensor '{raw.name}.{GROUPS}' does not say the group of each column",
                f"{index.dtype} {list(index.shape)}",
                f"[{columns}], each below {groups}",
            )
        in_order = tuple(column * groups // columns for column in range(columns))
        return column_groups == in_order

    def _by_index(
        self,
        raw: RawModule,
        spec: TensorSpec,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        start: int,
    ) -> torch.Tensor:
        """Dequantize columns from `start` on, each with the scale and zero point of its group."""
        index = raw.read(GROUPS)[start : start + codes.shape[1]].long()
        out = spec.dtype.empty(codes.shape)
        # A few rows at a time in float32 bound the memory; each weight is rounded once.
        for first, last in qtensor.row_chunks(*codes.shape):
            steps = codes[first:last].float()
            if zero is None:
                steps -= self.scheme.levels // 2
            else:
                steps -= zero[first:last].float()[:, index]
            out[first:last] = steps * scale[first:last].float()[:, index]
        return out


class PackQuantized(CompressedLinear):
    """Codes packed into words."""

    layout = PACKED_CODES
    code_type = DType.INT32

    def columns_per_unit(self, raw: RawModule, spec: TensorSpec) -> int:
        # Groups are whole words; without groups, columns can be read by words.
        return self.scheme.group_size or 32 // self.scheme.bits

    def codes(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> torch.Tensor:
        first, last = columns
        bits = self.scheme.bits
        shape = raw.read(SHAPE).tolist()
        if shape != list(spec.shape):
            raise raw.make_damage_error(
                f"tensor '{raw.name}.{SHAPE}' disagrees with the config", shape, list(spec.shape)
            )
        part = self.columns_slice(
            rows, first * bits // 32, count_words(last, bits), count_words(spec.shape[1], bits)
        )
        return qtensor.unpack_int32(raw.read(PACKED, part), bits, last - first)

    def zero_points(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None
    ) -> torch.Tensor:
        stored = raw.read(ZERO_POINT)
        if DType.of(stored.dtype) == DType.INT8:
            return self.whole_rows(self.to_unsigned(raw, stored), spec, rows)
        # The words pack the outputs, which `unpack_int32` expects along the last axis.
        zero = qtensor.unpack_int32(stored.t(), self.scheme.bits, spec.shape[0]).t()
        if rows is not None:
            zero = rows.of(zero)
        return zero.contiguous()

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

    def columns_per_unit(self, raw: RawModule, spec: TensorSpec) -> int:
        if spec.scheme is None:
            return 1
        return self.scheme.group_size or 1

    def codes(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> torch.Tensor:
        part = self.columns_slice(rows, *columns, spec.shape[1])
        return self.to_unsigned(raw, raw.read(PLAIN, part))

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor]:
        tensors = [self._to_signed(value.codes), value.scale.contiguous()]
        if value.zero is not None:
            tensors.append(self._to_signed(value.zero))
        return tensors

    def _to_signed(self, unsigned: torch.Tensor) -> torch.Tensor:
        # int16 represents the difference of any two bytes.
        half = self.scheme.levels // 2
        return (unsigned.to(torch.int16) - half).to(torch.int8).contiguous()
