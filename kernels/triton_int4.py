"""Triton kernels for weights of 4 bits in groups of 32, 64 or 128, with or without zero points."""

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
    spread,
    sum_splits,
    unit_range,
)  # fmt: skip


@triton.jit
def group_of(scale, zero, row, unit, units, GROUP: tl.constexpr, PART: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Scale and zero point [rows, units], float32, of one group in each unit."""
    at = row * (units * (128 // GROUP)) + unit * (128 // GROUP) + PART
    inside = unit < units
    step = tl.load(scale + at, mask=inside, other=0).to(tl.float32)
    if SYMMETRIC:
        return step, tl.full(step.shape, 8.0, tl.float32)
    return step, tl.load(zero + at, mask=inside, other=0).to(tl.float32)


@triton.jit
def centred(words, centre, magic, PLANE: tl.constexpr):
    """``(code - zero) * 2**bit_position`` of one plane, exact in float32."""
    return biased_codes(words, magic, PLANE, 4) - (8388608.0 + centre * 2.0 ** bit_position(PLANE, 4))


@triton.jit
def int4_gemv_tile(
    x, words, scale, zero, safe, k, units, magic, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products [M, N] of pointers to tokens [M, 1, 1] and rows [N, 1]: each thread multiplies words of BLOCK_N rows, in
    float32."""
    PARTS: tl.constexpr = 128 // GROUP
    first, last = unit_range(units, UNITS, 1)
    sums = tl.zeros((BLOCK_M, BLOCK_N, UNITS * 16), tl.float32)
    for start in tl.range(first, last, UNITS, num_stages=STAGES):
        unit = (start + tl.arange(0, UNITS))[None, :]
        word = start * 16 + tl.arange(0, UNITS * 16)
        tile = tl.load(words + safe * (units * 16) + word[None, :], mask=(word < units * 16)[None, :], other=0)
        for part in tl.static_range(PARTS):
            step, centre = group_of(scale, zero, safe, unit, units, GROUP, part, SYMMETRIC)
            centre = spread(centre, BLOCK_N, UNITS, 4)
            partial = tl.zeros((BLOCK_M, BLOCK_N, UNITS * 16), tl.float32)
            for plane in tl.static_range(part * 8 // PARTS, (part + 1) * 8 // PARTS):
                weight = centred(tile, centre, magic, plane)[None, :, :]
                partial = tl.fma(weight, load_tokens(x, word, k, plane, 4), partial)
            sums = tl.fma(partial, spread(step, BLOCK_N, UNITS, 4)[None, :, :], sums)
    return tl.sum(sums, 2)


@triton.jit
def int4_gemv(
    x, words, scale, zero, bias, out, m, n, k, units, magic,
    GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Few tokens."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)[:, None]
    token = tl.arange(0, BLOCK_M)
    x += (tl.where(token < m, token, 0) * k)[:, None, None]
    product = int4_gemv_tile(
        x, words, scale, zero, safe, k, units, magic, GROUP, SYMMETRIC, BLOCK_M, BLOCK_N, UNITS, STAGES
    )  # fmt: skip
    if BIAS:
        product += tl.trans(tl.load(bias + safe)).to(tl.float32)
    at = (tl.program_id(1) * m + token)[:, None].to(tl.int64) * n + row[None, :]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=(token < m)[:, None] & (row < n)[None, :])


@triton.jit
def int4_floats(
    words, scale, zero, out, n, k, units, magic,
    GROUP: tl.constexpr, SYMMETRIC: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The weight itself [n, k] in the dtype of `out`."""
    PARTS: tl.constexpr = 128 // GROUP
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)[:, None]
    start = tl.program_id(0) * UNITS
    unit = (start + tl.arange(0, UNITS))[None, :]
    word = (start * 16 + tl.arange(0, UNITS * 16))[None, :]
    tile = tl.load(words + safe * (units * 16) + word, mask=word < units * 16, other=0)
    for part in tl.static_range(PARTS):
        step, centre = group_of(scale, zero, safe, unit, units, GROUP, part, SYMMETRIC)
        step, centre = spread(step, BLOCK_N, UNITS, 4), spread(centre, BLOCK_N, UNITS, 4)
        for plane in tl.static_range(part * 8 // PARTS, (part + 1) * 8 // PARTS):
            weight = centred(tile, centre, magic, plane) * (step * 0.5 ** bit_position(plane, 4))
            column = columns_of(word, plane, 4)
            mask = (column < k) & (row < n)[:, None]
            tl.store(out + safe.to(tl.int64) * k + column, weight.to(out.dtype.element_ty), mask=mask)


@operator("int4_linear", mutates=("arrived",))
def int4_linear(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group: int,
    arrived: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``x @ weight.T + bias``, [M, I] to [M, O], in the tiles for the shape.

    Args:
        words: int32 [O, W], from `pack`.
        scale: [O, G], G for as many columns as there are words for.
        zero: uint8 [O, G], or None for 8 everywhere.
        group: columns that share a scale: 32, 64 or 128.
        arrived: for `skinny_product`.
    """
    config = tile_config_for(f"int4-g{group}", len(x), len(scale), x.shape[1], x.dtype, gpu_spec(x.device))
    return int4_product(x, words, scale, zero, bias, group, config, arrived)


@int4_linear.register_fake
def _(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group: int,
    arrived: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], len(scale))


def int4_product(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, group: int, config: TileConfig,
    arrived: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `int4_linear`, in the tiles of this config."""
    (m, k), n, units = x.shape, len(scale), words.shape[1] // 16
    if m == 0:
        return x.new_empty(0, n)
    if config.path == "skinny":
        return skinny_product(x, words, scale, zero, bias, group, arrived, config)
    if config.path == "gemm":
        return gemm_product(x, words, scale, zero, bias, group, config)
    symmetric = zero is None
    weight = words, scale, scale if zero is None else zero
    blocks = triton.cdiv(n, config.block_n)
    if config.path == "matmul":

        def fill(floats: Tensor, part: slice) -> None:
            wrap_triton(int4_floats)[(triton.cdiv(units, config.units), triton.cdiv(len(floats), config.block_n))](
                *(of_rows[part] for of_rows in weight), floats, len(floats), k, units, MAGIC, group, symmetric,
                BLOCK_N=config.block_n, UNITS=config.units, num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip

        return linear_by_parts(x, n, bias, fill)
    out = product_buffer(x, n, config)
    fused = bias is not None and config.split == 1
    arguments = (
        x.contiguous(), *weight, bias if fused else scale, out, m, n, k, units, MAGIC, group, symmetric, fused,
    )  # fmt: skip
    wrap_triton(int4_gemv)[(blocks, config.split)](*arguments, **config.constants())
    return sum_splits(out, bias, x.dtype)
