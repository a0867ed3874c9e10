"""One linear in GPTQ's layout.

A weight [O, I] of codes of 4 or 8 bits is ``qweight`` int32 [ceil(I * bits / 32), O], packed down
the inputs; ``qzeros`` int32 [G, ceil(O * bits / 32)], packed along the outputs (see `gptq_zeros`);
``scales`` [G, O], float16 from most writers; ``g_idx`` int32 [I], the group of each input. Words
are packed from their least significant bits. The tensors decide whether a weight is symmetric, and
whether groups are of adjacent inputs. Sources: the packages auto_gptq and gptqmodel.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import DAMAGED_FILE, GroupedCodec, Reason, Weight, exact_scale
from quantkit.formats.codecs.gptq_zeros import (
    Packed,
    Version,
    make_word_of_ones,
    unpack_zero_points,
)
from quantkit.formats.codecs.layouts import G_IDX, GPTQ, QWEIGHT, QZEROS, SCALES
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

SUFFIXES = (QWEIGHT, QZEROS, SCALES)


@dataclass(frozen=True)
class GptqLinear(GroupedCodec):
    """Codes packed down the inputs.

    Attributes:
        bits, group_size: as the settings state them; None for whole rows.
        symmetric: as the settings state it; if weights are read, the zero points decide.
        version: of the folder's zero points; None if quantkit writes: 1 for symmetric weights,
            which all readers support, and 2 for others, because 1 cannot store all zero points.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    version: Version | None = None

    @property
    def scheme(self) -> QuantScheme | None:
        # No other groups can be a scheme; weights with them are read as floats.
        if self.group_size is None or self.group_size % 8 == 0:
            return QuantScheme(self.bits, self.group_size, self.symmetric)
        return None

    def spec(self, raw: RawModule, expected: TensorSpec) -> TensorSpec:
        require_tensors(raw, expected)
        for tensor in self.parts(raw, expected):
            raw.require(tensor, self.scheme)
        packed = self._compute_packing(expected.shape)
        ordered = self._in_order(raw, packed)
        assert self.version is not None, "only codecs that write have none"
        symmetric = self.version.symmetric(raw)
        if not symmetric:
            self.version.require_whole(raw, packed)
        # A last group may be shorter than the others: groups that divide it and the others repeat
        # scales, and are all equally long.
        unit = math.gcd(packed.group_size, packed.columns)
        if not ordered or (packed.groups > 1 and unit % 8):
            if ordered:
                stored_as = f"GPTQ in groups of {unit}"
            else:
                stored_as = "GPTQ with act-order"
            return TensorSpec(
                name=expected.name,
                shape=expected.shape,
                dtype=expected.dtype,
                scheme=None,
                stored_as=stored_as,
            )
        # A single group is a row, unless the settings state a group of exactly that length.
        is_row = packed.groups == 1 and (self.group_size != packed.columns or unit % 8)
        scheme = QuantScheme(self.bits, None if is_row else unit, symmetric)
        return TensorSpec(expected.name, expected.shape, scales_dtype(raw), scheme)

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        return self._tensors(spec, DType.FLOAT16, indexed=True)

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return self._tensors(spec, scales_dtype(raw), indexed=raw.find(G_IDX) is not None)

    def columns_per_unit(self, raw: RawModule, spec: TensorSpec) -> int:
        group_size = None if spec.scheme is None else spec.scheme.group_size
        # Groups are whole words; without groups, columns can be read by words.
        return group_size or 32 // self.bits

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        packed = self._compute_packing(spec.shape)
        first, last = columns
        if rows is None:
            inputs = (first // packed.per_word, -(-last // packed.per_word))
            part = TensorSlice(0, (inputs,))
        else:
            # The tensor is transposed: its columns are the rows of the weight.
            part = TensorSlice(1, rows.ranges)
        words = raw.read(QWEIGHT, part)
        codes = qtensor.unpack_int32(words.t(), self.bits, last - first)
        if spec.scheme is None:
            return self._floats(raw, packed, spec.dtype, codes, rows, first)
        # The stored group of each group of the scheme, which may be shorter; see `spec`.
        groups = [0]
        size = spec.scheme.group_size
        if size is not None:
            groups = [column // packed.group_size for column in range(first, last, size)]
        bounds = (groups[0], groups[-1] + 1)
        scale = read_outputs(raw, SCALES, rows, bounds)
        within = [group - groups[0] for group in groups]
        zero = None
        if not spec.scheme.symmetric:
            zero = self._zeros(raw, packed, rows, bounds)[:, within]
        return qtensor.QuantTensor(codes, scale[:, within], zero, spec.scheme)

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        per_word = 32 // self.bits
        for axis, size in zip(("outputs", "inputs"), shape, strict=True):
            if size % per_word:
                return Reason(
                    f"its {axis} do not fill whole words",
                    found=size,
                    expected=f"a multiple of {per_word}",
                )
        return None

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor] | Reason:
        reason = self.misfit(value.shape)
        if reason is not None:
            return reason
        packed = self._compute_packing(value.shape)
        scale = exact_scale(value.scale, DType.FLOAT16)
        if isinstance(scale, Reason):
            return scale
        qweight = qtensor.pack_int32(value.codes, self.bits).t().contiguous()
        if value.zero is None:
            # Version 1 stores the zero point of symmetric codes, 2 ** (bits - 1), minus 1.
            field = 2 ** (self.bits - 1) - 1
            shape = packed.groups, packed.rows // packed.per_word
            qzeros = torch.full(shape, field * make_word_of_ones(self.bits), dtype=torch.int32)
        else:
            qzeros = qtensor.pack_int32(value.zero.t(), self.bits)
        g_idx = torch.arange(packed.columns, dtype=torch.int32) // packed.group_size
        return [qweight, qzeros, scale.t().contiguous(), g_idx]

    def _compute_packing(self, shape: tuple[int, ...]) -> Packed:
        rows, columns = shape
        return Packed(self.bits, rows, columns, min(self.group_size or columns, columns))

    def _tensors(self, spec: TensorSpec, scales: DType, *, indexed: bool) -> list[StoredTensor]:
        dtypes = {QWEIGHT: DType.INT32, QZEROS: DType.INT32, SCALES: scales}
        if indexed:
            dtypes[G_IDX] = DType.INT32
        return GPTQ.list_stored_tensors(spec, self.bits, self.group_size, dtypes)

    def _in_order(self, raw: RawModule, packed: Packed) -> bool:
        """Check whether groups are of adjacent inputs."""
        if raw.find(G_IDX) is None:
            return True
        data = raw.read_bytes(G_IDX)
        # Comparing bytes shows the usual order without unpacking them.
        words = [struct.pack("<i", group) * packed.group_size for group in range(packed.groups)]
        if data == b"".join(words)[: len(data)]:
            return True
        for (group,) in struct.iter_unpack("<i", data):
            if not 0 <= group < packed.groups:
                problem = f"tensor '{raw.name}.{G_IDX}' names a group that does not exist"
                raise raw.make_damage_error(problem, group, f"0 to {packed.groups - 1}")
        return False

    def _zeros(
        self, raw: RawModule, packed: Packed, rows: TensorSlice | None, groups: tuple[int, int]
    ) -> torch.Tensor:
        """Read the zero points [O, G] of some groups."""
        if self.version is None:
            version = 2
        else:
            version = self.version.of(raw)

        def unpack(words: torch.Tensor) -> torch.Tensor:
            # The last word of all outputs may be partly filled; selected words are unpacked whole,
            # and `read_outputs` picks the outputs.
            if rows is None:
                count = packed.rows
            else:
                count = words.shape[1] * packed.per_word
            return unpack_zero_points(words, self.bits, count, version)

        return read_outputs(raw, QZEROS, rows, groups, packed.per_word, unpack)

    def _floats(
        self,
        raw: RawModule,
        packed: Packed,
        dtype: DType,
        codes: torch.Tensor,
        rows: TensorSlice | None,
        start: int,
    ) -> torch.Tensor:
        """Dequantize the columns from `start` on, in float32, and round once."""
        stop = start + codes.shape[1]
        group = torch.arange(start, stop) // packed.group_size
        if raw.find(G_IDX) is not None:
            group = raw.read(G_IDX, TensorSlice(0, ((start, stop),))).long()
        groups = int(group.min()), int(group.max()) + 1
        scale = read_outputs(raw, SCALES, rows, groups)
        zero = self._zeros(raw, packed, rows, groups)
        group -= groups[0]
        out = dtype.empty(codes.shape)
        for first, last in qtensor.row_chunks(len(codes), stop - start):
            steps = codes[first:last].float() - zero[first:last].float()[:, group]
            out[first:last] = steps.mul_(scale[first:last].float()[:, group])
        return out


def read_outputs(
    raw: RawModule,
    suffix: str,
    rows: TensorSlice | None,
    lines: tuple[int, int],
    per_word: int = 1,
    unpack: Callable[[torch.Tensor], torch.Tensor] = lambda words: words,
) -> torch.Tensor:
    """Read the transpose [O, N] of some lines of a tensor [N, O], whose outputs may be packed into
    words.

    Args:
        rows: some outputs; None for all.
        unpack: from words [N, W] to outputs.
    """
    if rows is None:
        return unpack(raw.read(suffix, TensorSlice(0, (lines,)))).t().contiguous()
    words = tuple((start // per_word, -(-stop // per_word)) for start, stop in rows.ranges)
    outputs = unpack(raw.read(suffix, TensorSlice(1, words))[lines[0] : lines[1]])
    if per_word == 1:
        return outputs.t().contiguous()
    # The words at the ends of a range have outputs outside of it.
    indices: list[torch.Tensor] = []
    words_before = 0
    for (start, stop), (first, last) in zip(rows.ranges, words, strict=True):
        indices.append(torch.arange(start, stop) + (words_before - first) * per_word)
        words_before += last - first
    return outputs[:, torch.cat(indices)].t().contiguous()


def require_tensors(raw: RawModule, expected: TensorSpec) -> None:
    """Raise an error if a weight is not a matrix, or if its codes, scales or zero points are
    missing.
    """
    if len(expected.shape) != 2 or 0 in expected.shape:
        raise raw.make_unsupported_error(
            f"'{raw.name}' is quantized, but is not a matrix", list(expected.shape)
        )
    missing = [suffix for suffix in SUFFIXES if raw.find(suffix) is None]
    if missing:
        problem = f"'{raw.name}' is quantized, but its {' and '.join(missing)} are missing"
        raise raw.make_damage_error(problem, hint=DAMAGED_FILE)


def scales_dtype(raw: RawModule) -> DType:
    """Look up the float type of a module's scales; any other raises `UnsupportedError`."""
    scales = raw.find(SCALES)
    assert scales is not None
    if scales.dtype not in FLOATS:
        raise raw.make_unsupported_error(
            f"tensor '{scales.name}' is not stored in a float type",
            scales.dtype,
            " or ".join(FLOATS),
        )
    return scales.dtype
