"""How compressed-tensors stores one linear: ``pack-quantized``, which quantkit writes and vLLM and transformers read,
and ``int-quantized``, for products with activations in int8.

``pack-quantized``: ``weight_packed`` int32 [O, ceil(I * bits / 32)], ``weight_scale`` [O, G], ``weight_shape`` int64
[2] and, if asymmetric, ``weight_zero_point`` packed along the outputs, int32 [ceil(O * bits / 32), G]. Codes are
unsigned, least significant bits first. ``int-quantized``: ``weight`` int8 [O, I], ``weight_scale`` and, if
asymmetric, ``weight_zero_point`` int8 [O, G], all signed. Also read:
one scale for a whole weight, zero points in int8 along with packed codes, zero points of zero along with symmetric
ones, and ``weight_g_idx`` [I], the group of each column, from before compressed-tensors 0.20; if groups are not of
adjacent columns, the weight is read as floats.
Source: the compressed-tensors package's compressors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import GroupedCodec, RawModule, columns_slice
from quantkit.formats.codecs.layout import Layout, Shape, Shapes, words
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.tensors.qtensor import QuantTensor

PACKED, SHAPE = "weight_packed", "weight_shape"
PLAIN, SCALE, _ZERO, _GROUPS = "weight", "weight_scale", "weight_zero_point", "weight_g_idx"
_UNORDERED = "compressed-tensors with act-order"
_INDEX = {DType.INT32: "i", DType.INT64: "q"}


def _packed_shapes(rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    one_scale = [(1,), ()] if group_size is None else []
    return {
        PACKED: [(rows, words(columns, bits))], SCALE: [(rows, groups), *one_scale], SHAPE: [(2,)],
        _ZERO: [(words(rows, bits), groups), (rows, groups), *one_scale],  # in bytes before version 0.9
        _GROUPS: [(columns,)],
    }  # fmt: skip


def _plain_shapes(rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    one_scale = [(1,), (), (rows,)] if group_size is None else []
    scales = [(rows, groups), *one_scale]
    return {PLAIN: [(rows, columns)], SCALE: scales, _ZERO: scales, _GROUPS: [(columns,)]}


PACKED_CODES = Layout(
    "packed integers of compressed-tensors", PACKED, (SCALE,), ((SHAPE,),), if_asymmetric=(_ZERO,), zeros=_ZERO,
    floats=(SCALE,), integers=(PACKED, SHAPE, _ZERO, _GROUPS), shapes=_packed_shapes,
)  # fmt: skip
FP4 = Layout(
    "packed small floats of compressed-tensors", PACKED, (SCALE,), code_types=(DType.UINT8,), bits=4,
    others=("weight_global_scale",),
)  # fmt: skip
INT8 = Layout(
    "int8", PLAIN, (SCALE, "weight_scale_inv"), code_types=(DType.INT8,), bits=8, floats=(SCALE,),
    integers=(_ZERO, _GROUPS), shapes=_plain_shapes, unpacked=True, excluded="SCB",
)  # fmt: skip


@dataclass(frozen=True)
class PackQuantized(GroupedCodec):
    """Codes packed into words.

    Attributes:
        one_scale: whether all rows share one.
        by_index: whether the config says that there is a group for each column.
    """

    scheme: QuantScheme
    one_scale: bool = False
    by_index: bool = False

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        return _spec(raw, PACKED, self, expected)

    def stored(self, spec: TensorSpec) -> list[StoredTensor]:
        dtypes = {PACKED: DType.INT32, SCALE: spec.dtype, SHAPE: DType.INT64}
        return _stored(
            PACKED_CODES, spec, self.scheme, dtypes if self.scheme.symmetric else {**dtypes, _ZERO: DType.INT32}
        )

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return _parts(raw, self.stored(spec), self.scheme, self.one_scale)

    def unit(self, raw: RawModule, spec: TensorSpec) -> int:
        return self.scheme.group_size or 32 // self.scheme.bits  # groups are whole words

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> QuantTensor | Tensor:  # fmt: skip
        from quantkit.tensors.qtensor import unpack_int32

        (first, last), bits = columns, self.scheme.bits
        if (shape := raw.read(SHAPE).tolist()) != list(spec.shape):
            raise CheckpointError(
                f"tensor '{raw.name}.{SHAPE}' disagrees with the config", path=raw.path, found=shape,
                expected=list(spec.shape),
            )  # fmt: skip
        part = columns_slice(rows, first * bits // 32, words(last, bits), words(spec.shape[1], bits))
        codes = unpack_int32(raw.read(PACKED, part), bits, last - first)
        return _value(raw, spec, self.scheme, codes, self._zero(raw, spec, rows), rows, first)

    def encode(self, value: QuantTensor) -> list[Tensor]:
        import torch

        from quantkit.tensors.qtensor import pack_int32

        bits = value.scheme.bits
        tensors = [pack_int32(value.codes, bits), value.scale.contiguous(), torch.tensor(value.shape)]
        if value.zero is not None:
            tensors.append(pack_int32(value.zero.t(), bits).t().contiguous())
        return tensors

    def _zero(self, raw: RawModule, spec: TensorSpec, part: TensorSlice | None) -> Tensor | None:
        from quantkit.tensors.qtensor import unpack_int32

        stored = raw.find(_ZERO)
        if self.scheme.symmetric or stored is None:
            return None
        if stored.dtype == DType.INT8:
            return _whole_rows(_unsigned(raw, raw.read(_ZERO), self.scheme), spec, self.scheme, part)
        zero = unpack_int32(raw.read(_ZERO).t(), self.scheme.bits, spec.shape[0]).t()
        return (zero if part is None else part.of(zero)).contiguous()


@dataclass(frozen=True)
class IntQuantized(GroupedCodec):
    """Codes as signed bytes.

    Attributes:
        one_scale, by_index: see `PackQuantized`.
    """

    scheme: QuantScheme
    one_scale: bool = False
    by_index: bool = False

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        return _spec(raw, PLAIN, self, expected)

    def stored(self, spec: TensorSpec) -> list[StoredTensor]:
        dtypes = {PLAIN: DType.INT8, SCALE: spec.dtype}
        return _stored(INT8, spec, self.scheme, dtypes if self.scheme.symmetric else {**dtypes, _ZERO: DType.INT8})

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return _parts(raw, self.stored(spec), self.scheme, self.one_scale)

    def unit(self, raw: RawModule, spec: TensorSpec) -> int:
        return 1 if spec.scheme is None else self.scheme.group_size or 1

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> QuantTensor | Tensor:  # fmt: skip
        codes = _unsigned(raw, raw.read(PLAIN, columns_slice(rows, *columns, spec.shape[1])), self.scheme)
        zero = None
        if not self.scheme.symmetric:
            zero = _whole_rows(_unsigned(raw, raw.read(_ZERO), self.scheme), spec, self.scheme, rows)
        return _value(raw, spec, self.scheme, codes, zero, rows, columns[0])

    def encode(self, value: QuantTensor) -> list[Tensor]:
        import torch

        half = self.scheme.levels // 2
        stored = [value.codes] if value.zero is None else [value.codes, value.zero]
        codes, *zero = ((one.to(torch.int16) - half).to(torch.int8).contiguous() for one in stored)
        return [codes, value.scale.contiguous(), *zero]


def _stored(
    layout: Layout, spec: TensorSpec, scheme: QuantScheme, dtypes: Mapping[str, DType]
) -> list[StoredTensor]:  # fmt: skip
    return layout.stored(spec.name.removesuffix(".weight"), spec.shape, scheme.bits, scheme.group_size, dtypes)


def _spec(raw: RawModule, codes: str, form: PackQuantized | IntQuantized, expected: TensorSpec) -> TensorSpec:
    """The weight of codes and scales; floats if groups are not of adjacent columns.

    Raises:
        CheckpointError: if a tensor is missing, zero points contradict the scheme, or groups do not fit this weight.
        UnsupportedError: if groups do not divide a row.
    """
    found, scale, scheme = raw.find(codes), raw.find(SCALE), form.scheme
    if found is None or scale is None:
        raise CheckpointError(f"the config quantizes '{raw.name}', but its codes or scales are missing", path=raw.path)
    if scale.dtype not in FLOATS:
        raise CheckpointError(f"the scales of '{raw.name}' are no floats", path=raw.path, found=scale.dtype)
    shape = (found.shape[0] if found.shape else expected.shape[0], expected.shape[1])
    if shape[1] % (scheme.group_size or 1):
        raise UnsupportedError(f"group size of '{raw.name}' does not divide its row", path=raw.path, found=scheme)
    zero = raw.find(_ZERO)
    if scheme.symmetric and zero is not None and any(raw.read_bytes(_ZERO)):
        raise CheckpointError(
            f"the config calls '{raw.name}' symmetric, but it has zero points", path=raw.path,
            found=f"{zero.dtype} {list(zero.shape)}",
        )  # fmt: skip
    index = _group_index(raw, shape[1], scheme)
    if index is None and form.by_index:
        raise CheckpointError(
            f"the config says that '{raw.name}' has a group for each column, but '{_GROUPS}' is missing",
            path=raw.path, hint="a weight file is missing or damaged; download it again",
        )  # fmt: skip
    if index is None or index == _in_order(shape[1], scheme):
        return TensorSpec(expected.name, shape, scale.dtype, scheme)
    return TensorSpec(expected.name, shape, expected.dtype, None, _UNORDERED)


def _parts(
    raw: RawModule, stored: list[StoredTensor], scheme: QuantScheme, one_scale: bool
) -> list[StoredTensor]:  # fmt: skip
    """The tensors of a weight, in one of the forms that are read, and optional ones."""
    whole = next(tensor.shape for tensor in stored if tensor.name.endswith(SCALE))
    shapes = [(1,), (1, 1), ()] if one_scale else [whole]
    found = []
    for tensor in stored:
        there, forms = raw.find(tensor.name.removeprefix(f"{raw.name}.")), [(tensor.dtype, tensor.shape)]
        if tensor.name.endswith(SCALE) and there is not None:
            tensor = StoredTensor(tensor.name, there.dtype, shapes[0])
            forms = [(there.dtype, shape) for shape in shapes]
        elif tensor.name.endswith(_ZERO):
            forms += [(DType.INT8, shape) for shape in shapes]
        found.append(there if there is not None and (there.dtype, there.shape) in forms else tensor)
    others = (raw.find(_GROUPS), raw.find(_ZERO) if scheme.symmetric else None)
    return [*found, *(tensor for tensor in others if tensor is not None)]


def _value(
    raw: RawModule, spec: TensorSpec, scheme: QuantScheme, codes: Tensor, zero: Tensor | None,
    rows: TensorSlice | None, start: int,
) -> QuantTensor | Tensor:  # fmt: skip
    """The weight of codes whose first column is `start`; floats if each column has its own group."""
    from quantkit.tensors.qtensor import QuantTensor

    scale = _whole_rows(raw.read(SCALE), spec, scheme, rows)
    if spec.scheme is None:
        return _by_index(raw, spec, codes, scale, zero, scheme, start)
    if (size := scheme.group_size) is not None:
        groups = slice(start // size, -(-(start + codes.shape[1]) // size))
        scale, zero = scale[:, groups], None if zero is None else zero[:, groups]
    return QuantTensor(codes, scale, zero, scheme)


def _whole_rows(value: Tensor, spec: TensorSpec, scheme: QuantScheme, part: TensorSlice | None) -> Tensor:
    """One value for each group [O, G] of some rows; a single value is repeated."""
    rows, groups = spec.shape[0], scheme.groups(spec.shape[1])
    found = value.reshape(1, 1).expand(rows, 1) if value.numel() == 1 else value.reshape(rows, groups)
    return (found if part is None else part.of(found)).contiguous()


def _unsigned(raw: RawModule, signed: Tensor, scheme: QuantScheme) -> Tensor:
    """Unsigned codes or zero points from signed ones.

    Raises:
        CheckpointError: if one lies outside the scheme.
    """
    import torch

    if scheme.bits == 8:
        return signed.view(torch.uint8) ^ 128
    half = scheme.levels // 2
    if signed.numel() and not -half <= int(signed.min()) <= int(signed.max()) < half:
        raise CheckpointError(
            f"'{raw.name}' has codes outside its scheme", path=raw.path,
            found=f"{int(signed.min())} to {int(signed.max())}", expected=f"{-half} to {half - 1}",
        )  # fmt: skip
    return (signed + half).view(torch.uint8)


def _group_index(raw: RawModule, columns: int, scheme: QuantScheme) -> tuple[int, ...] | None:
    """The group of each column; None if no tensor states it, and groups are of adjacent columns.

    Raises:
        CheckpointError: if it is none for this weight.
    """
    index = raw.find(_GROUPS)
    if index is None:
        return None
    found: tuple[int, ...] = ()
    if index.dtype in _INDEX and index.shape == (columns,):
        found = struct.unpack(f"<{columns}{_INDEX[index.dtype]}", raw.read_bytes(_GROUPS))
    if found == (-1,) * columns:  # made, and never filled
        return _in_order(columns, scheme)
    if not found or min(found) < 0 or max(found) >= scheme.groups(columns):
        raise CheckpointError(
            f"tensor '{raw.name}.{_GROUPS}' does not say the group of each column", path=raw.path,
            found=f"{index.dtype} {list(index.shape)}", expected=f"[{columns}], each below {scheme.groups(columns)}",
        )  # fmt: skip
    return found


def _in_order(columns: int, scheme: QuantScheme) -> tuple[int, ...]:
    size = scheme.group_size or columns
    return tuple(column // size for column in range(columns))


def _by_index(
    raw: RawModule, spec: TensorSpec, codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme,
    start: int,
) -> Tensor:  # fmt: skip
    """The floats of columns from `start` on, each with the scale and zero point of its group."""
    from quantkit.tensors.qtensor import row_chunks

    index = raw.read(_GROUPS)[start : start + codes.shape[1]].long()
    out = spec.dtype.empty(codes.shape)
    for first, last in row_chunks(*codes.shape):
        offset = scheme.levels // 2 if zero is None else zero[first:last].float()[:, index]
        out[first:last] = (codes[first:last].float() - offset) * scale[first:last].float()[:, index]
    return out
