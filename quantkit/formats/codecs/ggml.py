"""Rows of GGUF tensors: as codes, or as floats where there are no kernels for their type.

A block of ``Q4_0`` or ``Q8_0`` is a float16 scale ``d`` and its codes: 16 bytes of two 4-bit codes
each, of which byte j holds those of weights j (low) and j + 16 (high), ``w = d * (code - 8)``; or
32 signed bytes, ``w = d * code``. Blocks run along rows, so a row of I weights has ``I / 32`` of
them. Scales may be negative. `ggml_blocks` has the blocks of other types. Source: ggml's block_q4_0
and block_q8_0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.files.gguf_types import GgmlType
from quantkit.files.tensor_file import TensorFile, View
from quantkit.formats.codecs.codec import CodeFormat, Reason, Weight, exact_scale
from quantkit.formats.codecs.ggml_blocks import LAYOUTS, BlockLayout
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import block_scales, qtensor, torch
from quantkit.tensors.scheme import EMBEDDING_SCHEME, GGUF_SCHEMES, Codes, QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice

BLOCK = 32
"""Weights that share a scale."""
# Of a float16.
_SCALE_BYTES = 2
FLOATS = {GgmlType.F32: DType.FLOAT32, GgmlType.F16: DType.FLOAT16, GgmlType.BF16: DType.BFLOAT16}
"""Types of floats, which are read as they are stored."""
SMALL_FLOATS = frozenset({GgmlType.MXFP4, GgmlType.NVFP4})
"""Types of small floats with scales."""
EXACT = frozenset(
    {
        GgmlType.Q4_0,
        GgmlType.Q5_0,
        GgmlType.Q8_0,
        GgmlType.Q3_K,
        GgmlType.Q6_K,
        GgmlType.IQ4_NL,
        GgmlType.IQ4_XS,
        GgmlType.TQ1_0,
        GgmlType.TQ2_0,
    }
)
"""Types of integers times scales that are exact in float32: 11 bits of a float16, 7 of a scale's
factor and 5 of a code, or 7 of a code alone.
"""
NOT_READ = frozenset(
    {
        GgmlType.Q8_1,
        GgmlType.Q8_K,
        GgmlType.Q1_0,
        GgmlType.I8,
        GgmlType.I16,
        GgmlType.I32,
        GgmlType.I64,
        GgmlType.F64,
    }
)
"""Types that no published weights have: for activations, integers, and one that gguf cannot
convert to floats.
"""
# Weights that are turned to floats at a time.
CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class BlockType:
    """A type with codes.

    Attributes:
        type: as a file states it.
        scheme: of its weights.
        layout: of its blocks, unless it is one of the two that are described above.
    """

    type: GgmlType
    scheme: QuantScheme
    layout: BlockLayout | None = None

    def decode(self, rows: torch.Tensor) -> qtensor.QuantTensor:
        """Decode rows of blocks to codes.

        Args:
            rows: [O, N] uint8, whole blocks.

        Returns:
            [O, I], of `scheme`, scales in float16.
        """
        count = rows.shape[0]
        blocks = rows.reshape(count, rows.shape[1] // self.type.block_bytes, self.type.block_bytes)
        if self.layout is not None:
            codes, scales = self.layout.unpack(blocks.flatten(0, 1))
            scales = scales.map(lambda values: values.reshape(count, -1))
            return qtensor.QuantTensor.of_blocks(codes.reshape(count, -1), scales, self.scheme)
        # A view as floats needs contiguous, aligned bytes.
        scale = blocks[..., :_SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        data = blocks[..., _SCALE_BYTES:]
        if self.scheme.bits == 8:
            # Codes of a `QuantTensor` are unsigned: a signed byte plus 128 flips its highest bit.
            codes = data ^ 0x80
        else:
            codes = torch.cat((data & 0xF, data >> 4), -1)
        return qtensor.QuantTensor(
            codes.reshape(count, -1), scale.view(torch.float16).squeeze(-1), None, self.scheme
        )

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        return self.explain_unsupported(self.scheme, shape[-1])

    def encode(self, value: qtensor.QuantTensor) -> torch.Tensor | Reason:
        """Encode a weight as blocks [O, N] uint8, with the same codes and scales; or explain why
        there are none.
        """
        reason = self.explain_unsupported(value.scheme, value.shape[1])
        if reason is not None:
            return reason
        rows, columns = value.shape
        if self.layout is not None:
            # Powers of two are stored as exponents, whatever their type here.
            if value.scheme.scales is not Scales.POWERS and value.scale.dtype != torch.float16:
                return Reason(
                    "its scales have a different type",
                    found=DType.of(value.scale.dtype),
                    expected="float16",
                )
            count = rows * columns // self.type.block
            stored = value.block_scales or block_scales.BlockScales(value.scale, None, None, None)
            scales = stored.map(lambda values: values.reshape(count, -1))
            return self.layout.pack(value.codes.reshape(count, -1), scales).view(rows, -1)
        scale = exact_scale(value.scale, DType.FLOAT16)
        if isinstance(scale, Reason):
            return scale
        # Longer groups are stored as several blocks with the same scale.
        blocks = columns // BLOCK
        scale = scale.repeat_interleave(blocks // scale.shape[1], -1).unsqueeze(-1)
        codes = value.codes.reshape(rows, blocks, BLOCK)
        low = codes[..., : BLOCK // 2]
        high = codes[..., BLOCK // 2 :]
        if self.scheme.bits == 8:
            data = codes ^ 0x80
        else:
            data = low | high << 4
        return torch.cat((scale.view(torch.uint8), data), -1).view(rows, -1)

    def explain_unsupported(self, scheme: QuantScheme, columns: int | None = None) -> Reason | None:
        """Explain why weights of a scheme, in rows of `columns`, cannot be stored in such blocks;
        None if they can.
        """
        # Rows of unknown length are assumed to be whole blocks.
        if columns is None:
            columns = self.type.block
        if self.layout is not None and scheme == self.scheme and columns % self.type.block == 0:
            return None
        if self.layout is not None and scheme == self.scheme:
            return Reason(f"{self.type.block} does not divide its row", found=f"{columns} columns")
        if scheme.scales != self.scheme.scales:
            return Reason("its scales are stored differently", found=scheme, expected=self.scheme)
        if scheme.bits != self.scheme.bits:
            return Reason(
                "its bit width is different", found=scheme, expected=f"{self.scheme.bits} bits"
            )
        if not scheme.symmetric:
            return Reason("it has zero points", found=scheme, expected="a symmetric scheme")
        if scheme.group_size is not None and scheme.group_size % BLOCK:
            return Reason(f"{BLOCK} does not divide its group size", found=scheme)
        if columns % BLOCK:
            return Reason(f"{BLOCK} does not divide its row", found=f"{columns} columns")
        return None


Q4_0 = BlockType(GgmlType.Q4_0, QuantScheme(4, BLOCK))
Q8_0 = BlockType(GgmlType.Q8_0, QuantScheme(8, BLOCK))

BLOCK_TYPES = {Q4_0.type: Q4_0, Q8_0.type: Q8_0}
"""The types that are read as codes; weights in others are read as floats, unless
`Container.with_codes` is used.
"""
CODED_TYPES = BLOCK_TYPES | {
    kind: BlockType(kind, layout.scheme, layout) for kind, layout in LAYOUTS.items()
}
"""All types that have codes."""
_BY_SCHEME = {kind.scheme: kind for kind in CODED_TYPES.values() if kind.layout is not None}


def block_type(scheme: QuantScheme) -> BlockType:
    """Choose the type with the scales of a scheme and codes of its bits; Q4_0 or Q8_0 if there is
    none.
    """
    default = Q4_0 if scheme.bits == 4 else Q8_0
    return _BY_SCHEME.get(scheme, default)


class GgmlBlocks(CodeFormat):
    """All types with codes, as the format of quantized weights in a file; a weight that none holds
    exactly is rounded to one of the first two.
    """

    name = "gguf"
    schemes = (Q4_0.scheme, Q8_0.scheme)
    scale_dtype = DType.FLOAT16
    # Blocks with scales of their own take no more bytes than those that repeat a token's scale.
    embeddings = (Q8_0.scheme, *GGUF_SCHEMES.values(), EMBEDDING_SCHEME)
    scales = frozenset({Scales.FLOATS, Scales.BLOCKS, Scales.SUPER_BLOCKS, Scales.POWERS})
    codes = frozenset({Codes.INTEGERS, Codes.TABLE, Codes.E2M1})

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> BlockType | Reason:
        kind = block_type(scheme)
        return kind.explain_unsupported(scheme) or kind


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

    def decode(self, raw: object, spec: TensorSpec, part: TensorSlice | None = None) -> Weight:
        """Decode the weight [O, I], or some of its rows or columns; other rows are not read.

        Raises:
            RequestError: for codes of columns that cut a group; see `QuantTensor.columns`.
            CheckpointError: see `TensorFile.read`.
        """
        view = self.view
        columns = self.view.shape[1] // self.type.block_bytes * self.type.block
        first_column = 0
        end_column = columns
        if part is not None and part.axis == 1:
            # Read the complete blocks that cover the columns; the rest is cut off after decoding.
            ((start, stop),) = part.ranges
            part = None
            first = start // self.type.block
            last = -(-stop // self.type.block)
            view = view.narrow(
                1, first * self.type.block_bytes, (last - first) * self.type.block_bytes
            )
            first_column = start - first * self.type.block
            end_column = stop - first * self.type.block
        if not self.coded:
            return self._decode_columns(view, part, first_column, end_column)
        result = CODED_TYPES[self.type].decode(self.file.read_view(view, part))
        if (first_column, end_column) == (0, columns):
            return result
        return result.columns(first_column, end_column)

    def _decode_columns(
        self, view: View, rows: TensorSlice | None, first_column: int, end_column: int
    ) -> torch.Tensor:
        """Dequantize some columns, in float32 for a few rows at a time, and round once."""
        rows = rows or TensorSlice(0, ((0, view.shape[0]),))
        target = self.dtype.empty((rows.size, end_column - first_column))
        columns = view.shape[1] // self.type.block_bytes * self.type.block
        for start, stop in qtensor.row_chunks(rows.size, columns, CHUNK_ELEMENTS):
            raw = self.file.read_view(view, rows.rows(start, stop))
            target[start:stop] = dequantize_rows(raw, self.type)[:, first_column:end_column]
        return target

    def of_expert(self, expert: int) -> GgmlRows:
        """Return the rows of one expert out of bytes [E, O, N]."""
        return replace(self, view=self.view.at(expert))


def dequantize_rows(rows: torch.Tensor, kind: GgmlType) -> torch.Tensor:
    """Dequantize rows of blocks, bytes [O, N], to float32 with the gguf package."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # Later checks find what is not finite.
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind.value]))
