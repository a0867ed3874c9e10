"""Triton kernels for quantized linears: 8 bits with one scale a row, or 4 bits in groups of 32, 64
or 128 columns.

A `group` of None, and a GROUP of 0 in kernels, stands for 8 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels import triton_words as tw
from quantkit.kernels.triton_gemm import gemm_product
from quantkit.kernels.triton_skinny import skinny_product
from quantkit.kernels.triton_tiles import TileConfig, gpu_spec, tile_config_for
from quantkit.kernels.triton_words import (
    MAGIC,
    bit_position,
    columns_of,
    load_tokens,
    spread,
    to_biased_floats,
    unit_range,
)

# Bytes of a weight that are converted to floats in memory at a time.
FLOAT_BYTES = 512 << 20
# Rows that are converted at a time, at least.
_ROWS = 128


@triton.jit
def group_of(
    scale, zero, row, unit, units, GROUP: tl.constexpr, PART: tl.constexpr, SYMMETRIC: tl.constexpr
):
    """Load scale and zero point, float32, of one group in each unit [rows, units]; of a row of 8
    bits [rows, 1].
    """
    if GROUP == 0:
        step = tl.load(scale + row).to(tl.float32)
        centre = tl.full(step.shape, 128.0, tl.float32)
    else:
        at = row * (units * (128 // GROUP)) + unit * (128 // GROUP) + PART
        step = tl.load(scale + at, mask=unit < units, other=0).to(tl.float32)
        if SYMMETRIC:
            centre = tl.full(step.shape, 8.0, tl.float32)
        else:
            centre = tl.load(zero + at, mask=unit < units, other=0).to(tl.float32)
    return step, centre


@triton.jit
def center_codes(words, centre, magic, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Compute ``(code - zero) * 2**bit_position`` of one plane, exact in float32."""
    # 8388608 is 2**23, under whose exponent `to_biased_floats` puts the codes.
    return to_biased_floats(words, magic, PLANE, BITS) - (
        8388608.0 + centre * 2.0 ** bit_position(PLANE, BITS)
    )


@triton.jit
def gemv_tile(
    x,
    words,
    scale,
    zero,
    safe,
    k,
    units,
    magic,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply pointers to tokens [M, 1, 1] by rows [N], to [M, N]: each thread multiplies words of
    BLOCK_N rows, in float32.
    """
    BITS: tl.constexpr = 8 if GROUP == 0 else 4
    PARTS: tl.constexpr = 1 if GROUP == 0 else 128 // GROUP
    PLANES: tl.constexpr = 32 // BITS
    RUN: tl.constexpr = 4 * BITS
    first, last = unit_range(units, UNITS, 1)
    sums = tl.zeros((BLOCK_M, BLOCK_N, UNITS * RUN), tl.float32)
    for start in tl.range(first, last, UNITS, num_stages=STAGES):
        unit = (start + tl.arange(0, UNITS))[None, :]
        word = start * RUN + tl.arange(0, UNITS * RUN)
        at = (safe * (units * RUN))[:, None] + word[None, :]
        tile = tl.load(words + at, mask=(word < units * RUN)[None, :], other=0)
        if GROUP == 0:
            for plane in tl.static_range(PLANES):
                weight = center_codes(tile, 128.0, magic, plane, BITS)[None, :, :]
                sums = tl.fma(weight, load_tokens(x, word, k, plane, BITS), sums)
        else:
            for part in tl.static_range(PARTS):
                step, centre = group_of(
                    scale, zero, safe[:, None], unit, units, GROUP, part, SYMMETRIC
                )
                centre = spread(centre, BLOCK_N, UNITS, BITS)
                partial = tl.zeros((BLOCK_M, BLOCK_N, UNITS * RUN), tl.float32)
                for plane in tl.static_range(part * PLANES // PARTS, (part + 1) * PLANES // PARTS):
                    weight = center_codes(tile, centre, magic, plane, BITS)[None, :, :]
                    partial = tl.fma(weight, load_tokens(x, word, k, plane, BITS), partial)
                sums = tl.fma(partial, spread(step, BLOCK_N, UNITS, BITS)[None, :, :], sums)
    product = tl.sum(sums, 2)
    if GROUP == 0:
        product *= tl.load(scale + safe).to(tl.float32)[None, :]
    return product


@triton.jit
def gemv(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    m,
    n,
    k,
    units,
    magic,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply few tokens."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    token = tl.arange(0, BLOCK_M)
    x += (tl.where(token < m, token, 0) * k)[:, None, None]
    product = gemv_tile(
        x,
        words,
        scale,
        zero,
        safe,
        k,
        units,
        magic,
        GROUP,
        SYMMETRIC,
        BLOCK_M,
        BLOCK_N,
        UNITS,
        STAGES,
    )
    if BIAS:
        product += tl.load(bias + safe).to(tl.float32)[None, :]
    at = (tl.program_id(1) * m + token)[:, None].to(tl.int64) * n + row[None, :]
    tl.store(
        out + at, product.to(out.dtype.element_ty), mask=(token < m)[:, None] & (row < n)[None, :]
    )


@triton.jit
def floats(
    words,
    scale,
    zero,
    out,
    n,
    k,
    units,
    magic,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Convert the weight [n, k] to the dtype of `out`."""
    BITS: tl.constexpr = 8 if GROUP == 0 else 4
    PARTS: tl.constexpr = 1 if GROUP == 0 else 128 // GROUP
    PLANES: tl.constexpr = 32 // BITS
    RUN: tl.constexpr = 4 * BITS
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)[:, None]
    start = tl.program_id(0) * UNITS
    unit = (start + tl.arange(0, UNITS))[None, :]
    word = (start * RUN + tl.arange(0, UNITS * RUN))[None, :]
    tile = tl.load(words + safe * (units * RUN) + word, mask=word < units * RUN, other=0)
    for part in tl.static_range(PARTS):
        step, centre = group_of(scale, zero, safe, unit, units, GROUP, part, SYMMETRIC)
        step, centre = spread(step, BLOCK_N, UNITS, BITS), spread(centre, BLOCK_N, UNITS, BITS)
        for plane in tl.static_range(part * PLANES // PARTS, (part + 1) * PLANES // PARTS):
            weight = center_codes(tile, centre, magic, plane, BITS) * (
                step * 0.5 ** bit_position(plane, BITS)
            )
            column = columns_of(word, plane, BITS)
            mask = (column < k) & (row < n)[:, None]
            tl.store(
                out + safe.to(tl.int64) * k + column, weight.to(out.dtype.element_ty), mask=mask
            )


@tw.operator(
    "linear", lambda x, words, scale, *_: x.new_empty(len(x), len(scale)), mutates=("arrived",)
)
def linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int | None,
    arrived: Tensor,
) -> Tensor:
    """Compute ``x @ weight.T + bias``, [M, I] to [M, O], in the tiles for the shape.

    Args:
        words: int32 [O, W], from `pack`.
        scale: [O, 1], or [O, G] with G for as many columns as there are words for.
        zero: uint8 [O, G], or None for the middle of the codes everywhere.
        group: columns that share a scale, with 4 bits.
        arrived: for `skinny_product`.
    """
    if group is None:
        scheme = "int8"
    else:
        scheme = f"int4-g{group}"
    config = tile_config_for(scheme, len(x), len(scale), x.shape[1], x.dtype, gpu_spec(x.device))
    return linear_product(x, words, scale, zero, bias, group, config, arrived)


def linear_product(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int | None,
    config: TileConfig,
    arrived: Tensor,
) -> Tensor:
    """Compute the product of `linear`, in the tiles of this config."""
    m, k = x.shape
    n = len(scale)
    # A unit of 128 columns fills 32 words with codes of 8 bits, and 16 with codes of 4.
    if group is None:
        units = words.shape[1] // 32
    else:
        units = words.shape[1] // 16
    if m == 0:
        return x.new_empty(0, n)
    if config.path == "skinny":
        return skinny_product(x, words, scale, zero, bias, group, arrived, config)
    if config.path == "gemm":
        return gemm_product(x, words, scale, zero, bias, group, config)
    constants = {"GROUP": group or 0, "SYMMETRIC": zero is None}
    # A kernel takes no None; with SYMMETRIC it does not read what stands for it.
    if zero is None:
        zero = scale
    if config.path == "matmul":
        # By torch, with parts of a large weight as floats, one after the other.
        products = []
        size = max(_ROWS, FLOAT_BYTES // (k * x.element_size()) // _ROWS * _ROWS)
        for start in range(0, n, size):
            part = slice(start, min(start + size, n))
            weights = x.new_empty(part.stop - start, k)
            wrap_triton(floats)[
                (triton.cdiv(units, config.units), triton.cdiv(len(weights), config.block_n))
            ](
                words[part],
                scale[part],
                zero[part],
                weights,
                len(weights),
                k,
                units,
                MAGIC,
                **constants,
                BLOCK_N=config.block_n,
                UNITS=config.units,
                num_warps=config.warps,
                num_stages=config.stages,
            )
            part_bias = None if bias is None else bias[part]
            products.append(F.linear(x, weights, part_bias))
        # `cat` would copy the only product.
        if len(products) == 1:
            return products[0]
        return torch.cat(products, 1)
    out = tw.product_buffer(x, n, config)
    # With several programs for a row, `sum_splits` adds the bias to the sum of their parts.
    fused = bias is not None and config.split == 1
    wrap_triton(gemv)[(triton.cdiv(n, config.block_n), config.split)](
        x.contiguous(),
        words,
        scale,
        zero,
        bias if fused else scale,
        out,
        m,
        n,
        k,
        units,
        MAGIC,
        **constants,
        BIAS=fused,
        **config.constants(),
    )
    return tw.sum_splits(out, bias, x.dtype)
