"""The layout of one linear in GPTQ.

A weight [O, I] of codes of 4 or 8 bits is ``qweight`` int32 [ceil(I * bits / 32), O], packed down
the inputs; ``qzeros`` int32 [G, ceil(O * bits / 32)], packed along the outputs (see `gptq_zeros`);
``scales`` [G, O], float16 from most writers; ``g_idx`` int32 [I], the group of each input. Words
are packed from their least significant bits. The tensors decide whether a weight is symmetric, and
whether groups are of adjacent inputs. Sources: the packages auto_gptq and gptqmodel.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.codecs.codec import (
    DAMAGED_FILE,
    GroupedCodec,
    RawModule,
    Reason,
    Weight,
    exact_scale,
)
from quantkit.formats.codecs.gptq_zeros import (
    G_IDX,
    QWEIGHT,
    QZEROS,
    SCALES,
    Packed,
    Version,
    ones,
    unpack_zero_points,
)
from quantkit.formats.codecs.layout import Layout, Shape, Shapes, words
from quantkit.tensors.dtypes import FLOATS, DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

SUFFIXES = (QWEIGHT, QZEROS, SCALES)


def _shapes(
    rows: int, columns: int, bits: int, group_size: int | None, block: Shape | None
) -> Shapes:
    groups = math.ceil(columns / (group_size or columns))
    return {
        QWEIGHT: [(words(columns, bits), rows)],
        QZEROS: [(groups, words(rows, bits))],
        SCALES: [(groups, rows)],
        G_IDX: [(columns,)],
    }


GPTQ = Layout(
    "codes of GPTQ",
    QWEIGHT,
    (SCALES,),
    ((QZEROS,),),
    packed_outputs=QZEROS,
    zeros=QZEROS,
    floats=(SCALES,),
    integers=(QWEIGHT, QZEROS, G_IDX),
    shapes=_shapes,
    is_evident=lambda tensors: not packs_outputs(tensors),
)


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
        whole = self.group_size is None or self.group_size % 8 == 0
        if whole:
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
        unit = math.gcd(packed.group_size, packed.columns)
        if not ordered or (packed.groups > 1 and unit % 8):
            if ordered:
                stored_as = f"GPTQ in groups of {unit}"
            else:
                stored_as = "GPTQ with act-order"
            return TensorSpec(expected.name, expected.shape, expected.dtype, None, stored_as)
        one = packed.groups == 1 and (self.group_size != packed.columns or unit % 8)
        scheme = QuantScheme(self.bits, None if one else unit, symmetric)
        return TensorSpec(expected.name, expected.shape, scales_dtype(raw), scheme)

    def list_stored_tensors(self, spec: TensorSpec) -> list[StoredTensor]:
        return self._tensors(spec, DType.FLOAT16, indexed=True)

    def parts(self, raw: RawModule, spec: TensorSpec) -> list[StoredTensor]:
        return self._tensors(spec, scales_dtype(raw), indexed=raw.find(G_IDX) is not None)

    def unit(self, raw: RawModule, spec: TensorSpec) -> int:
        if spec.scheme is None:
            groups = None
        else:
            groups = spec.scheme.group_size
        return groups or 32 // self.bits  # groups are whole words

    def read(
        self, raw: RawModule, spec: TensorSpec, rows: TensorSlice | None, columns: tuple[int, int]
    ) -> Weight:
        packed = self._compute_packing(spec.shape)
        (first, last) = columns
        inputs = TensorSlice(0, ((first // packed.per_word, -(-last // packed.per_word)),))
        words = raw.read(QWEIGHT, inputs if rows is None else TensorSlice(1, rows.ranges))
        codes = qtensor.unpack_int32(words.t(), self.bits, last - first)
        if spec.scheme is None:
            return self._floats(raw, packed, spec.dtype, codes, rows, first)
        groups = [0]
        if (size := spec.scheme.group_size) is not None:
            groups = [column // packed.group_size for column in range(first, last, size)]
        bounds = (groups[0], groups[-1] + 1)
        symmetric = spec.scheme.symmetric
        scale = read_outputs(raw, SCALES, rows, bounds)
        if symmetric:
            zero = None
        else:
            zero = self._zeros(raw, packed, rows, bounds)
        within = [group - groups[0] for group in groups]
        return qtensor.QuantTensor(
            codes, scale[:, within], None if zero is None else zero[:, within], spec.scheme
        )

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        per_word = 32 // self.bits
        for what, size in zip(("outputs", "inputs"), shape, strict=True):
            if size % per_word:
                return Reason(
                    f"its {what} fill no whole words",
                    found=size,
                    expected=f"a multiple of {per_word}",
                )
        return None

    def encode(self, value: qtensor.QuantTensor) -> list[torch.Tensor] | Reason:
        if (reason := self.misfit(value.shape)) is not None:
            return reason
        packed = self._compute_packing(value.shape)
        scale = exact_scale(value.scale, DType.FLOAT16)
        if isinstance(scale, Reason):
            return scale
        qweight = qtensor.pack_int32(value.codes, self.bits).t().contiguous()
        if value.zero is None:
            field = 2 ** (self.bits - 1) - 1
            shape = packed.groups, packed.rows // packed.per_word
            qzeros = torch.full(shape, field * ones(self.bits), dtype=torch.int32)
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
            dtypes |= {G_IDX: DType.INT32}
        else:
            dtypes |= {}
        return GPTQ.list_stored_tensors(spec, self.bits, self.group_size, dtypes)

    def _in_order(self, raw: RawModule, packed: Packed) -> bool:
        """Return whether groups are of adjacent inputs."""
        if raw.find(G_IDX) is None:
            return True
        found = raw.read_bytes(G_IDX)
        words = (struct.pack("<i", group) * packed.group_size for group in range(packed.groups))
        if found == b"".join(words)[: len(found)]:
            return True
        groups = [group for (group,) in struct.iter_unpack("<i", found)]
        if (stray := next((g for g in groups if not 0 <= g < packed.groups), None)) is not None:
            problem = f"tensor '{raw.name}.{G_IDX}' names a group that does not exist"
            raise raw.make_damage_error(problem, stray, f"0 to {packed.groups - 1}")
        return False

    def _zeros(
        self, raw: RawModule, packed: Packed, rows: TensorSlice | None, groups: tuple[int, int]
    ) -> torch.Tensor:
        """Return the zero points [O, G] of some groups."""
        if self.version is None:
            version = 2
        else:
            version = self.version.of(raw)

        def unpack(words: torch.Tensor) -> torch.Tensor:
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
        """Return the weights of columns from `start` on, computed in float32 and rounded once."""
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
    """Return the transpose [O, N] of some lines of a tensor [N, O], whose outputs may be packed
    into words.

    Args:
        rows: some outputs; None for all.
        unpack: from words [N, W] to outputs.
    """
    if rows is None:
        return unpack(raw.read(suffix, TensorSlice(0, (lines,)))).t().contiguous()
    words = tuple((start // per_word, -(-stop // per_word)) for start, stop in rows.ranges)
    found = unpack(raw.read(suffix, TensorSlice(1, words))[lines[0] : lines[1]])
    if per_word == 1:
        return found.t().contiguous()
    kept = []
    before = 0
    for (start, stop), (first, last) in zip(rows.ranges, words, strict=True):
        kept.append(torch.arange(start, stop) + (before - first) * per_word)
        before += last - first
    return found[:, torch.cat(kept)].t().contiguous()


def packs_outputs(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether codes are packed along the outputs, as in AWQ: they have the width of their
    zero points.
    """
    codes = tensors[QWEIGHT]
    zeros = tensors.get(QZEROS)
    return zeros is not None and codes.shape[-1:] == zeros.shape[-1:]


def require_tensors(raw: RawModule, expected: TensorSpec) -> None:
    """Raise an error if a weight is not a matrix, or if its codes, scales or zero points are
    missing.
    """
    if len(expected.shape) != 2 or 0 in expected.shape:
        raise raw.make_unsupported_error(
            f"'{raw.name}' is no matrix, and has codes", list(expected.shape)
        )
    if missing := [suffix for suffix in SUFFIXES if raw.find(suffix) is None]:
        problem = f"'{raw.name}' is quantized, but its {' and '.join(missing)} are missing"
        raise raw.make_damage_error(problem, hint=DAMAGED_FILE)


def scales_dtype(raw: RawModule) -> DType:
    """Return the float type of a module's scales; any other raises `UnsupportedError`."""
    found = raw.find(SCALES)
    assert found is not None
    if found.dtype not in FLOATS:
        raise raw.make_unsupported_error(
            f"tensor '{found.name}' holds no floats", found.dtype, " or ".join(FLOATS)
        )
    return found.dtype
