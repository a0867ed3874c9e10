"""Products of more than 16 tokens on tensor cores: codes become floats in registers, and stay where
they were loaded.

A word holds pairs of codes, one in its lower half and one in its upper: put under an exponent, a
pair is two floats. Less the zero point, which is exact, and times the scale, which is rounded once,
they are weights in the dtype of the activations. Hopper's tensor cores take a tile of weights from
registers, and this one is in the order in which threads have loaded its words: nothing moves
between threads, nothing waits, and one dot takes a whole unit of columns. For that the rows of a
tile are loaded in the order of `tile_rows`, and the activations lie in that of `dot_order`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels.triton_skinny import base_bits, halves, less
from quantkit.kernels.triton_tiles import UNIT, TileConfig
from quantkit.kernels.triton_words import (
    MAGIC,
    WIDEN,
    dot_add,
    product_buffer,
    sum_splits,
    unit_range,
)


def dot_order(x: Tensor, bits: int) -> Tensor:
    """Permute the columns of activations [..., I] to the order in which words of codes are
    multiplied; zeros fill the last unit: [..., ceil(I / UNIT) * UNIT].
    """
    *leading, columns = x.shape
    x = F.pad(x, (0, -columns % UNIT))
    if bits == 4:
        # Halves of a word, threads, words of a thread.
        ordered = x.view(*leading, -1, 2, 4, 4).transpose(-1, -3)
    else:
        # Halves of a word, pairs, halves of a unit, threads, words of a thread.
        ordered = x.view(*leading, -1, 2, 2, 2, 4, 4).movedim(
            (-3, -4, -1, -2, -5), (-5, -4, -3, -2, -1)
        )
    return ordered.reshape(*leading, -1).contiguous()


def base_of(dtype: torch.dtype) -> int:
    """Return the bits of the float under a code, once in a word or twice."""
    if dtype == torch.float32:
        return MAGIC
    return base_bits(dtype)


@triton.constexpr_function
def under(dtype):
    """Return the number under a code."""
    return 2.0**23 if dtype == tl.float32 else 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.jit
def pair(codes, base, ADD: tl.constexpr, MASK: tl.constexpr, DTYPE: tl.constexpr):
    """Convert the codes in the lower and upper halves of words to floats: what lies under them plus
    the codes.

    ADD: `base` has bits where codes have some.
    """
    if DTYPE.is_fp32():
        low, high = codes & MASK, (codes >> 16) & MASK
        low, high = (low + base, high + base) if ADD else (low | base, high | base)
        low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    else:
        # Not after a return above, which would not keep Triton from compiling this part.
        codes = codes & (MASK * 0x10001)
        low, high = halves(codes + base if ADD else codes | base, DTYPE)
    return low, high


@triton.jit
def times(number, step):
    """Multiply ``number * step`` in the dtype of the first, rounded once."""
    if step.dtype == number.dtype and not WIDEN:
        return number * step
    return (number.to(tl.float32) * step.to(tl.float32)).to(number.dtype)


@triton.jit
def tile_rows(first, ROWS: tl.constexpr):
    """Compute the order in which rows are loaded: of each 16 a thread of tensor cores holds one of
    the first eight and one of the others, and of a tile it loads one of the first half and one of
    the second.
    """
    index = tl.arange(0, ROWS)
    return first + index % (ROWS // 2) // 8 * 16 + index // (ROWS // 2) * 8 + index % 8


@triton.jit
def in_order(low, high, ROWS: tl.constexpr):
    """Arrange pairs [ROWS, 16] as [ROWS, 32]: rows as in the weight; of four threads with four
    words each, the threads last.
    """
    tile = tl.reshape(tl.join(low, high), (2, ROWS // 16, 8, 4, 4, 2))
    return tl.reshape(tl.permute(tile, (1, 0, 2, 4, 3, 5)), (ROWS, 32))


@triton.jit
def side_by_side(tile0, tile1, tile2, tile3, ROWS: tl.constexpr):
    """Join four tiles [ROWS, 32] to one [ROWS, 128]."""
    tile = tl.join(tl.join(tile0, tile2), tl.join(tile1, tile3))
    return tl.reshape(tl.permute(tile, (0, 2, 3, 1)), (ROWS, 128))


@triton.jit
def int4_pair(
    words,
    scale,
    zero,
    group,
    base,
    NUMBER: tl.constexpr,
    PARTS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Convert one of four tiles [ROWS, 32] of weights of 4 bits."""
    at = group + NUMBER * PARTS // 4
    lanes: tl.constexpr = 1 if DTYPE.is_fp32() else 0x10001
    step = tl.load(scale + at)
    if SYMMETRIC:
        low, high = pair(words >> 4 * NUMBER, base, False, 15, DTYPE)
        centre = tl.full(low.shape, 8 + under(DTYPE), DTYPE)
    else:
        # The zero point is subtracted as an integer: from floats, it would take pairs apart.
        raised = base + (16 - tl.load(zero + at).to(tl.int32)) * lanes
        low, high = pair(words >> 4 * NUMBER, raised, True, 15, DTYPE)
        centre = tl.full(low.shape, 16 + under(DTYPE), DTYPE)
    return in_order(times(less(low, centre), step), times(less(high, centre), step), ROWS)


@triton.jit
def int8_pair(words, base, NUMBER: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """Convert one of two tiles [ROWS, 32] of codes of 8 bits less 128, of half a unit."""
    codes = words >> 8 * NUMBER
    if DTYPE.is_bf16():
        # bfloat16 has 7 bits for a code: the eighth one chooses what is subtracted.
        low, high = pair(codes, base, False, 0x7F, DTYPE)
        low_base, high_base = pair(~codes, base, False, 0x80, DTYPE)
    else:
        low, high = pair(codes, base, False, 0xFF, DTYPE)
        low_base = tl.full(low.shape, 128 + under(DTYPE), DTYPE)
        high_base = low_base
    return in_order(less(low, low_base), less(high, high_base), ROWS)


@triton.jit
def pair_tile(
    left,
    right,
    scale,
    zero,
    group,
    base,
    NUMBER: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Convert one of the four tiles [ROWS, 32] of a unit; codes of 8 bits where GROUP is 0."""
    if GROUP == 0:
        tile = int8_pair(left if NUMBER < 2 else right, base, NUMBER % 2, DTYPE, ROWS)
    else:
        tile = int4_pair(
            left, scale, zero, group, base, NUMBER, 128 // GROUP, SYMMETRIC, DTYPE, ROWS
        )
    return tile


@triton.jit
def load_tokens(x, unit, units, NUMBER: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr):
    """Load some columns of a unit of tokens [COLUMNS, M], zeros where it is beyond the last."""
    column = unit * 128 + NUMBER * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    if UNITS == 1:
        return tl.load(x + column)
    return tl.load(x + column, mask=column < units * 128, other=0)


@triton.jit
def gemm_tile(
    x,
    words,
    scale,
    zero,
    first_row,
    n,
    units,
    base,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Multiply rows from the first one on by pointers to tokens [1, M] in `dot_order`, to [N, M];
    codes of 8 bits where GROUP is 0. Weights of 4 bits are rounded to the dtype of x, codes of 8
    bits are exact in it.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    PARTS: tl.constexpr = 0 if GROUP == 0 else 128 // GROUP
    WIDTH: tl.constexpr = 32 if GROUP == 0 else 16
    row = tile_rows(first_row, BLOCK_N)
    safe = tl.where(row < n, row, 0)[:, None]
    word = words + safe * (units * WIDTH) + tl.arange(0, 16)[None, :]
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first, last = unit_range(units, UNITS, 2)
    for start in tl.range(first, last, UNITS):
        for ahead in tl.static_range(UNITS):
            unit = start + ahead
            here = unit if UNITS == 1 else tl.minimum(unit, units - 1)
            left = tl.load(word + here * WIDTH)
            right = tl.load(word + here * WIDTH + 16) if GROUP == 0 else left
            group = safe * (units * PARTS) + here * PARTS
            if DTYPE.is_fp32():
                # No tensor cores: as much at a time as the registers hold.
                for number in tl.static_range(4):
                    tokens = load_tokens(x, unit, units, number, 32, UNITS)
                    tile = pair_tile(
                        left,
                        right,
                        scale,
                        zero,
                        group,
                        base,
                        number,
                        GROUP,
                        SYMMETRIC,
                        DTYPE,
                        BLOCK_N,
                    )
                    product = dot_add(tile, tokens, product)
            else:
                tokens = load_tokens(x, unit, units, 0, 128, UNITS)
                tile0 = pair_tile(
                    left, right, scale, zero, group, base, 0, GROUP, SYMMETRIC, DTYPE, BLOCK_N
                )
                tile1 = pair_tile(
                    left, right, scale, zero, group, base, 1, GROUP, SYMMETRIC, DTYPE, BLOCK_N
                )
                tile2 = pair_tile(
                    left, right, scale, zero, group, base, 2, GROUP, SYMMETRIC, DTYPE, BLOCK_N
                )
                tile3 = pair_tile(
                    left, right, scale, zero, group, base, 3, GROUP, SYMMETRIC, DTYPE, BLOCK_N
                )
                product = dot_add(
                    side_by_side(tile0, tile1, tile2, tile3, BLOCK_N), tokens, product
                )
    if GROUP == 0:
        row = first_row + tl.arange(0, BLOCK_N)
        product *= tl.load(scale + tl.where(row < n, row, 0)).to(tl.float32)[:, None]
    return product


@triton.jit
def gemm(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    m,
    n,
    units,
    base,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Compute the transposed product; codes of 8 bits where GROUP is 0."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    x += (tl.where(token < m, token, 0) * (units * 128))[None, :]
    first_row = tl.program_id(1) * BLOCK_N
    product = gemm_tile(
        x, words, scale, zero, first_row, n, units, base, GROUP, SYMMETRIC, BLOCK_M, BLOCK_N, UNITS
    )
    row = first_row + tl.arange(0, BLOCK_N)
    if BIAS:
        product += tl.load(bias + tl.where(row < n, row, 0)).to(tl.float32)[:, None]
    at = (tl.program_id(2) * m + token)[None, :].to(tl.int64) * n + row[:, None]
    tl.store(
        out + at, product.to(out.dtype.element_ty), mask=(token < m)[None, :] & (row < n)[:, None]
    )


def gemm_product(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int | None,
    config: TileConfig,
) -> Tensor:
    """Compute ``x @ weight.T + bias``; arguments as for the operators."""
    m = x.shape[0]
    n = len(scale)
    if group is None:
        bits = 8
    else:
        bits = 4
    out = product_buffer(x, n, config)
    # With several programs for a row, `sum_splits` adds the bias to the sum of their parts.
    fused = bias is not None and config.split == 1
    grid = triton.cdiv(m, config.block_m), triton.cdiv(n, config.block_n), config.split
    wrap_triton(gemm)[grid](
        dot_order(x, bits),
        words,
        scale,
        scale if zero is None else zero,
        bias if fused else scale,
        out,
        m,
        n,
        words.shape[1] // (4 * bits),
        base_of(x.dtype),
        group or 0,
        zero is None,
        fused,
        **config.constants(),
    )
    return sum_splits(out, bias, x.dtype)
