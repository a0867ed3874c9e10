"""torchao's plain int8 and int4 tensors in safetensors: read only.

A weight ``M.weight`` is stored as ``M._weight_qdata``, ``M._weight_scale`` and mostly
``M._weight_zero_point``. JSON in the file's header, under ``M.weight``, states the class of tensor
that they make, and the size of its blocks:

- ``Int8Tensor``: int8 [O, I], scale [O, G], zero point int8 [O, G]; ``w = scale * (q - zero)``.
- ``IntxUnpackedToInt8Tensor``: the same with fewer bits; the zero point may be of floats.
- ``Int4Tensor``: two signed codes a byte [O, I / 2], the low half first; scale and offset [G, O] of
  floats; ``w = scale * q + offset``.

Source: torchao's safetensors_support, and the docstrings of these classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from quantkit.base.json_values import Settings, format_value, parse_object
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import FLOAT_MODEL, GroupedCodec, QuantMethod, Reader, Weight
from quantkit.formats.codecs.layout import MAX_COLUMNS, Shape
from quantkit.formats.codecs.layouts import TORCHAO_CODES, TORCHAO_SCALE
from quantkit.formats.codecs.mlx import affine, scheme_of, zero_points
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

_ZERO = "_weight_zero_point"
_OF_ACTIVATIONS = (
    "_weight_act_pre_scale",
    "_weight_act_quant_scale",
    "_weight_act_quant_zero_point",
)
_INT8 = "Int8Tensor"
_INTX = "IntxUnpackedToInt8Tensor"
_INT4 = "Int4Tensor"


class Plain(GroupedCodec):
    """Codes in the order of the weights, in the class that the header states."""

    # The tensors decide.
    scheme: QuantScheme | None = None

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        weight = _Weight.of(raw, expected.shape)
        scheme = weight.scheme()
        if scheme is None:
            return TensorSpec(
                expected.name, expected.shape, expected.dtype, stored_as=f"torchao's {weight.kind}"
            )
        return TensorSpec(expected.name, expected.shape, weight.dtype, scheme)

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        tensors: list[StoredTensor] = []
        for leaf in (TORCHAO_CODES, TORCHAO_SCALE, _ZERO):
            tensor = raw.find(leaf)
            if tensor is not None:
                tensors.append(tensor)
        return tensors

    def columns_per_unit(self, raw: RawModule, spec: TensorSpec) -> int:
        weight = _Weight.of(raw, spec.shape)
        # One scale a row applies to any columns; two codes may share a byte.
        if weight.group_size == weight.columns:
            return 2
        return weight.group_size

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        weight = _Weight.of(raw, spec.shape)
        first, last = columns
        codes = weight.codes(self.columns_slice(rows, first, last, weight.columns))
        groups = slice(first // weight.group_size, -(-last // weight.group_size))
        scale = weight.groups(TORCHAO_SCALE, rows)[:, groups]
        zero = weight.groups(_ZERO, rows)[:, groups]
        if spec.scheme is None:
            return affine(codes, scale, zero, spec.dtype, weight.middle)
        if spec.scheme.symmetric:
            points = None
        else:
            points = weight.points(scale, zero)
        return qtensor.QuantTensor(codes, scale.contiguous(), points, spec.scheme)


@dataclass(frozen=True)
class _Weight:
    """A weight as the header describes it; its tensors were checked."""

    raw: RawModule
    # The class of tensor.
    kind: str
    bits: int
    # Of its scales.
    dtype: DType
    rows: int
    columns: int
    group_size: int
    # Whether each row has separate scales.
    by_row: bool

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @classmethod
    def of(cls, raw: RawModule, shape: tuple[int, ...]) -> _Weight:
        """Describe the weight of a module from the header, and check its tensors.

        Args:
            shape: [O, I].

        Raises:
            UnsupportedError: for another class, and for scales of activations.
            CheckpointError: if the header has no description, or the tensors contradict it.
        """
        name = f"{raw.name}.weight"
        text = raw.metadata(TORCHAO_CODES, name)
        if text is None:
            problem = f"the header does not describe '{raw.name}.{TORCHAO_CODES}'"
            raise raw.make_damage_error(problem, expected=f"torchao's metadata under '{name}'")
        described = Settings(parse_object(text, raw.path), raw.path, name)
        kind = described.string("_type")
        if kind not in (_INT8, _INTX, _INT4):
            problem = f"'{raw.name}' is a torchao tensor of an unsupported type"
            raise raw.make_unsupported_error(
                problem,
                format_value(kind),
                f"{_INT8}, {_INTX} or {_INT4}, which are plain",
                FLOAT_MODEL,
            )
        for leaf in _OF_ACTIVATIONS:
            if raw.find(leaf) is not None:
                raise raw.make_unsupported_error(
                    "scales of activations are not supported", f"'{raw.name}.{leaf}'"
                )
        data = described.inside("_data")
        rows, columns = shape
        block = data.numbers("block_size", 1, MAX_COLUMNS)
        # Sizes of 0 fit no tensors.
        block_rows = 0
        size = 0
        if len(block) == 2 and all(length.is_integer() for length in block):
            block_rows = int(block[0])
            size = int(block[1])
        codes = raw.find(TORCHAO_CODES)
        scale = raw.find(TORCHAO_SCALE)
        zero = raw.find(_ZERO)
        of_int4 = kind == _INTX and data.inside("target_dtype").string("_data") == DType.INT4
        bits = 4 if kind == _INT4 or of_int4 else 8
        # Blocks of one row have scales for each row; blocks of all rows share them.
        scale_rows = rows if block_rows == 1 else 1
        groups = (scale_rows, columns // size if size else 0)
        if kind == _INTX:
            zeros: tuple[DType, ...] = (DType.INT8, *FLOATS)
        else:
            zeros = (DType.INT8,)
        packed = 1
        if kind == _INT4 and scale is not None:
            # Scales and offsets are transposed, and two codes share a byte.
            groups = groups[::-1]
            zeros = (scale.dtype,)
            packed = 2
        block_fits = block_rows == 1 or (block_rows == rows and kind != _INT4)
        # Groups are rows, or multiples of 8 as in all schemes.
        size_fits = (
            size > 0
            and not columns % size
            and not (size % 8 and size != columns)
            and not columns % packed
        )
        # Only bytes of two codes may be unsigned.
        codes_fit = (
            codes is not None
            and codes.shape == (rows, columns // packed)
            and codes.dtype in (DType.INT8, DType.UINT8)[:packed]
        )
        scale_fits = scale is not None and scale.shape == groups and scale.dtype in FLOATS
        if zero is None:
            zero_fits = kind == _INT8
        else:
            zero_fits = zero.shape == groups and zero.dtype in zeros
        fitting = block_fits and size_fits and codes_fit and scale_fits and zero_fits
        if not fitting or scale is None:
            descriptions: list[str] = []
            for tensor in (codes, scale, zero):
                if tensor is not None:
                    descriptions.append(f"{tensor.dtype} {list(tensor.shape)}")
            raise raw.make_damage_error(
                f"the tensors of '{raw.name}' do not have matching shapes and types for an {kind}",
                ", ".join(descriptions),
                f"quantized weights, scales and zero points for {list(shape)} in blocks of"
                f" {format_value(list(block))}",
            )
        return cls(raw, kind, bits, scale.dtype, rows, columns, size, block_rows == 1)

    def scheme(self) -> QuantScheme | None:
        """Find the scheme of its codes; None if offsets are not multiples of scales."""
        if self.kind == _INT4:
            return scheme_of(
                self.raw, TORCHAO_SCALE, _ZERO, self.bits, self.group_size, self.middle
            )
        zero = self.groups(_ZERO, None)
        symmetric = not zero.any()
        if not symmetric:
            # Raises an error for zero points that are no codes; these classes need no scales.
            self.points(zero, zero)
        group_size = None if self.group_size == self.columns else self.group_size
        return QuantScheme(self.bits, group_size, symmetric)

    def codes(self, part: TensorSlice | None) -> torch.Tensor:
        """Read unsigned codes [R, C] uint8; codes beyond the bits raise `CheckpointError`."""
        if self.kind == _INT4:
            if part is not None and part.axis == 1:
                byte_ranges = tuple((start // 2, -(-stop // 2)) for start, stop in part.ranges)
                part = TensorSlice(1, byte_ranges)
            data = self.raw.read(TORCHAO_CODES, part).view(torch.uint8)
            return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2) ^ self.middle
        # Addition modulo 256 turns two's complement into unsigned codes.
        codes = self.raw.read(TORCHAO_CODES, part).view(torch.uint8) + self.middle
        if self.bits == 4 and codes.numel() and int(codes.max()) > 15:
            raise self.raw.make_damage_error(
                f"tensor '{self.raw.name}.{TORCHAO_CODES}' contains values outside the range of"
                " int4"
            )
        return codes

    def groups(self, leaf: str, rows: TensorSlice | None) -> torch.Tensor:
        """Read scales or zero points [R, G] of some rows; zeros where there are none."""
        count = self.rows if rows is None else rows.size
        if self.raw.find(leaf) is None:
            return torch.zeros(count, self.columns // self.group_size, dtype=torch.int8)
        if self.kind == _INT4:
            ranges = ((0, self.rows),) if rows is None else rows.ranges
            pieces = [self.raw.read(leaf, TensorSlice(1, (bounds,))) for bounds in ranges]
            return torch.cat(pieces, 1).t().contiguous()
        if self.by_row:
            return self.raw.read(leaf, rows)
        return self.raw.read(leaf).expand(count, -1)

    def points(self, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Convert zero points to codes, uint8; others raise `UnsupportedError`."""
        if self.kind == _INT4:
            points = zero_points(scale, zero, self.bits, self.middle)
            if points is not None:
                return points
        else:
            # Float zero points may have fractions, which no scheme has.
            shifted = zero.double() + self.middle
            in_range = (shifted >= 0) & (shifted < 1 << self.bits)
            if bool(((shifted == shifted.round()) & in_range).all()):
                return shifted.to(torch.uint8)
        raise self.raw.make_unsupported_error(
            f"zero points of '{self.raw.name}' are not integers in the range of its weights"
        )


class TorchAo(QuantMethod):
    """``quant_method: torchao``: the weights that are stored as its tensors."""

    name = "torchao"

    def read_settings(
        self, settings: Settings, modules: Iterable[str], stored: Collection[str]
    ) -> dict[str, Plain]:
        codecs: dict[str, Plain] = {}
        for module in modules:
            if f"{module}.{TORCHAO_CODES}" in stored:
                codecs[module] = Plain()
        return codecs

    def readers(
        self, schemes: Mapping[str, QuantScheme | None], *, without: Collection[Reader] = ()
    ) -> str:
        return "transformers with torchao"


def find_problem(raw: RawModule, shape: Shape) -> str | None:
    """Explain why the tensors of a weight [O, I] do not fit together, by their headers; None if
    they do.
    """
    try:
        _Weight.of(raw, shape)
    except UnsupportedError:
        # A class of tensors that others may read.
        return None
    except CheckpointError as error:
        return f"{error.problem}: found {error.found}, expected {error.expected}"
    return None
