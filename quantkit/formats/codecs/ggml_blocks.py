"""GGUF's blocks of 32 weights that store codes exactly: ``Q4_0`` and ``Q8_0``.

A block of either is a float16 scale ``d`` and its codes: 16 bytes of two 4-bit codes each, of which byte j holds those
of weights j (low) and j + 16 (high), ``w = d * (code - 8)``; or 32 signed bytes, ``w = d * code``. Blocks run along
rows, so a row of I weights has ``I / 32`` of them. Scales may be negative.
Source: ggml's block_q4_0 and block_q8_0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.formats.codecs.codec import CodeFormat, Reason, exact_scale
from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.tensors.qtensor import QuantTensor

BLOCK = 32
"""Weights that share a scale."""
_SCALE_BYTES = 2


@dataclass(frozen=True)
class BlockType:
    """One of the two types.

    Attributes:
        name: ggml's.
        scheme: of its weights.
    """

    name: str
    scheme: QuantScheme

    @property
    def block_bytes(self) -> int:
        return _SCALE_BYTES + BLOCK * self.scheme.bits // 8

    def row_bytes(self, columns: int) -> int:
        """The size of a row of `columns` weights, a multiple of 32."""
        return columns // BLOCK * self.block_bytes

    def decode(self, rows: Tensor) -> QuantTensor:
        """Rows of blocks as codes.

        Args:
            rows: [O, N] uint8, whole blocks.

        Returns:
            [O, I], of `scheme`, scales in float16.
        """
        import torch

        from quantkit.tensors.qtensor import QuantTensor

        count = rows.shape[0]
        blocks = rows.reshape(count, rows.shape[1] // self.block_bytes, self.block_bytes)
        scale = blocks[..., :_SCALE_BYTES].clone(memory_format=torch.contiguous_format)  # floats need aligned bytes
        data = blocks[..., _SCALE_BYTES:]
        codes = data ^ 0x80 if self.scheme.bits == 8 else torch.cat((data & 0xF, data >> 4), -1)
        return QuantTensor(codes.reshape(count, -1), scale.view(torch.float16).squeeze(-1), None, self.scheme)

    def misfit(self, shape: tuple[int, ...]) -> Reason | None:
        return self.unsupported(self.scheme, shape[-1])

    def encode(self, value: QuantTensor) -> Tensor | Reason:
        """The blocks [O, N] uint8 of a weight, with the same codes and scales; or why there are none."""
        import torch

        reason = self.unsupported(value.scheme, value.shape[1])
        if reason is not None:
            return reason
        rows, columns = value.shape
        scale = exact_scale(value.scale, DType.FLOAT16)
        if isinstance(scale, Reason):
            return scale
        blocks = columns // BLOCK
        scale = scale.repeat_interleave(blocks // scale.shape[1], -1).unsqueeze(-1)
        codes = value.codes.reshape(rows, blocks, BLOCK)
        low, high = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
        data = codes ^ 0x80 if self.scheme.bits == 8 else low | high << 4
        return torch.cat((scale.view(torch.uint8), data), -1).view(rows, -1)

    def unsupported(self, scheme: QuantScheme, columns: int = BLOCK) -> Reason | None:
        """Why weights of a scheme, in rows of `columns`, cannot be stored in such blocks; None if they can."""
        if scheme.bits != self.scheme.bits:
            return Reason("its codes have another size", found=scheme, expected=f"{self.scheme.bits} bits")
        if not scheme.symmetric:
            return Reason("it has zero points", found=scheme, expected="a symmetric scheme")
        if scheme.group_size is not None and scheme.group_size % BLOCK:
            return Reason(f"{BLOCK} does not divide its group size", found=scheme)
        if columns % BLOCK:
            return Reason(f"{BLOCK} does not divide its row", found=f"{columns} columns")
        return None


Q4_0 = BlockType("Q4_0", QuantScheme(4, BLOCK))
Q8_0 = BlockType("Q8_0", QuantScheme(8, BLOCK))

BLOCK_TYPES = {kind.name: kind for kind in (Q4_0, Q8_0)}
"""The types that are read as codes, by ggml's names; weights in others are read as floats."""


def block_type(scheme: QuantScheme) -> BlockType:
    """The type with codes of a scheme's bits."""
    return Q4_0 if scheme.bits == 4 else Q8_0


class GgmlBlocks(CodeFormat):
    """Both types, as the format of quantized weights in a file."""

    name = "gguf"
    schemes = (Q4_0.scheme, Q8_0.scheme)
    scale_dtype = DType.FLOAT16

    def codec(self, scheme: QuantScheme, *, embedding: bool = False) -> BlockType | Reason:
        kind = block_type(scheme)
        return kind.unsupported(scheme) or kind
