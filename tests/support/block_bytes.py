"""Random bytes of llama.cpp's block types, and their values by the gguf package."""

from __future__ import annotations

import gguf
import torch
from torch import Tensor

from quantkit.files.gguf_types import GgmlType

FLOATS = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q8_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q2_K: (80, 82),
    GgmlType.Q3_K: (108,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
    GgmlType.IQ4_NL: (0,),
    GgmlType.IQ4_XS: (0,),
    GgmlType.MXFP4: (0,),
}
"""Where the float16 numbers of a block are; of MXFP4, the exponent of its power of two."""


def draw_blocks(kind: GgmlType, rows: int, columns: int, size: float | None = None) -> Tensor:
    """Draw rows of blocks [O, N] whose bytes take all values, with scales of either sign.

    Args:
        size: the root mean square of the weights; None is whatever scales of 0.02 make.
    """
    blocks = torch.randint(0, 256, (rows * columns // kind.block, kind.block_bytes))
    blocks = blocks.to(torch.uint8)
    # Normal numbers may be tiny, and then most of a block is its minimum.
    scales = torch.randn(len(blocks), len(FLOATS[kind])) / 50
    _put_scales(kind, blocks, scales)
    if size is not None:
        wide = dequantize(kind, blocks.view(rows, -1))
        _put_scales(kind, blocks, scales * (size / wide.square().mean().sqrt()))
    return blocks.view(rows, -1)


def _put_scales(kind: GgmlType, blocks: Tensor, scales: Tensor) -> None:
    if kind is GgmlType.MXFP4:
        # e8m0: the bias is 127.
        blocks[:, 0] = (scales[:, 0].abs().log2().round() + 127).to(torch.uint8)
        return
    for offset, values in zip(FLOATS[kind], scales.unbind(1), strict=True):
        blocks[:, offset : offset + 2] = values.half().unsqueeze(1).view(torch.uint8)


def dequantize(kind: GgmlType, blocks: Tensor) -> Tensor:
    """Dequantize rows of blocks with the gguf package."""
    ggml = gguf.GGMLQuantizationType[kind.name]
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), ggml))
