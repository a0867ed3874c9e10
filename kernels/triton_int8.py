"""Triton kernels for weights of 8 bits with one scale a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels.triton_gemm import gemm_product
from quantkit.kernels.triton_skinny import skinny_product
from quantkit.kernels.triton_tiles import TileConfig, gpu_spec, tile_config_for
from quantkit.kernels.triton_words import (
    MAGIC,
    biased_codes,
    bit_position,
    columns_of,
    linear_by_parts,
    load_tokens,
    operator,
    product_buffer,
    sum_splits,
    unit_range,
)  # fmt: skip


@triton.jit
def centred(words, magic, PLANE: tl.constexpr):
    """``(code - 128) * 2**bit_position`` of one plane, exact in float32."""
    return biased_codes(words, magic, PLANE, 8) - (8388608.0 + 128.0 * 2.0 ** bit_position(PLANE, 8))


@triton.jit
def int8_gemv_tile(
    x, words, scale, safe, k, units, magic,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products [M, N] of pointers to tokens [M, 1, 1] and rows [N]: each thread multiplies words of BLOCK_N rows, in
    float32."""
    first, last = unit_range(units, UNITS, 1)
    sums = tl.zeros((BLOCK_M, BLOCK_N, UNITS * 32), tl.float32)
    for start in tl.range(first, last, UNITS, num_stages=STAGES):
        word = start * 32 + tl.arange(0, UNITS * 32)
        at = (safe * (units * 32))[:, None] + word[None, :]
        tile = tl.load(words + at, mask=(word < units * 32)[None, :], other=0)
        for plane in tl.static_range(4):
            sums = tl.fma(centred(tile, magic, plane)[None, :, :], load_tokens(x, word, k, plane, 8), sums)
    return tl.sum(sums, 2) * tl.load(scale + safe).to(tl.float32)[None, :]


@triton.jit
def int8_gemv(
    x, words, scale, bias, out, m, n, k, units, magic,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Few tokens."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    token = tl.arange(0, BLOCK_M)
    x += (tl.where(token < m, token, 0) * k)[:, None, None]
    product = int8_gemv_tile(x, words, scale, safe, k, units, magic, BLOCK_M, BLOCK_N, UNITS, STAGES)
    if BIAS:
        product += tl.load(bias + safe).to(tl.float32)[None, :]
    at = (tl.program_id(1) * m + token)[:, None].to(tl.int64) * n + row[None, :]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=(token < m)[:, None] & (row < n)[None, :])


@triton.jit
def int8_floats(
    words, scale, out, n, k, units, magic, BLOCK_N: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The weight itself [n, k] in the dtype of `out`."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    word = tl.program_id(0) * UNITS * 32 + tl.arange(0, UNITS * 32)
    at = (safe * (units * 32))[:, None] + word[None, :]
    tile = tl.load(words + at, mask=(word < units * 32)[None, :], other=0)
    step = tl.load(scale + safe).to(tl.float32)[:, None]
    for plane in tl.static_range(4):
        weight = centred(tile, magic, plane) * (step * 0.5 ** bit_position(plane, 8))
        column = columns_of(word, plane, 8)[None, :]
        mask = (column < k) & (row < n)[:, None]
        tl.store(out + safe.to(tl.int64)[:, None] * k + column, weight.to(out.dtype.element_ty), mask=mask)


@operator("int8_linear", mutates=("arrived",))
def int8_linear(x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, arrived: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, [M, I] to [M, O], in the tiles for the shape.

    Args:
        words: int32 [O, W], from `pack`.
        scale: [O, 1].
        arrived: for `skinny_product`.
    """
    config = tile_config_for("int8", len(x), len(scale), x.shape[1], x.dtype, gpu_spec(x.device))
    return int8_product(x, words, scale, bias, config, arrived)


@int8_linear.register_fake
def _(x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, arrived: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], len(scale))


def int8_product(
    x: Tensor, words: Tensor, scale: Tensor, bias: Tensor | None, config: TileConfig, arrived: Tensor | None = None
) -> Tensor:
    """As `int8_linear`, in the tiles of this config."""
    (m, k), n, units = x.shape, len(scale), words.shape[1] // 32
    if m == 0:
        return x.new_empty(0, n)
    if config.path == "skinny":
        return skinny_product(x, words, scale, None, bias, None, arrived, config)
    if config.path == "gemm":
        return gemm_product(x, words, scale, None, bias, None, config)
    if config.path == "matmul":

        def fill(floats: Tensor, part: slice) -> None:
            grid = triton.cdiv(units, config.units), triton.cdiv(len(floats), config.block_n)
            wrap_triton(int8_floats)[grid](
                words[part], scale[part], floats, len(floats), k, units, MAGIC,
                BLOCK_N=config.block_n, UNITS=config.units, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip

        return linear_by_parts(x, n, bias, fill)
    out = product_buffer(x, n, config)
    fused = bias is not None and config.split == 1
    arguments = (x.contiguous(), words, scale, bias if fused else scale, out, m, n, k, units, MAGIC, fused)
    blocks = triton.cdiv(n, config.block_n)
    wrap_triton(int8_gemv)[(blocks, config.split)](*arguments, **config.constants())
    return sum_splits(out, bias, x.dtype)
