"""Products of up to 16 tokens on tensor cores, which read each weight once and convert none:
bfloat16 and float16 only.

A word holds pairs of codes, one in its lower half and one in its upper: put under an exponent, a
pair is two small floats that tensor cores take as they are. For 4 bits these are ``base + code``;
what that adds to the products, ``(base + zero)`` times the sum of a group's activations, comes from
a product with ones, and the group's scale is applied to the sum. For 8 bits a subtraction gives
``code - 128``, exactly.

A program is one warp, for 16 or 32 rows, so that many of them keep loads in flight; several share a
row. Each writes its sums, and the one that arrives last adds them up in order: one launch, and the
same bits each time.
"""

from __future__ import annotations

import re

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels.triton_tiles import SKINNY_ROWS, UNIT, TileConfig
from quantkit.kernels.triton_words import WIDEN, dot_add, unit_range

_BASES = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
"""The bits of 128 and of 1024, whose last place is 1."""

_VERSION = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
SIDE_BY_SIDE = tl.constexpr(2 if _VERSION < (3, 8) else 1)
"""Pairs along K that lie side by side in a thread's registers, as Triton lays out a joined
operand of `tl.dot`.
"""


def base_bits(dtype: torch.dtype) -> int:
    """Return the bits of the float under a code, twice, for activations of a dtype."""
    return _BASES[dtype] * 0x10001


def allocate_counters(rows: int, device: torch.device) -> Tensor:
    """Allocate counters of the programs of each block of rows that have arrived: int32 zeros, as
    each launch finds and leaves them.
    """
    return torch.zeros(triton.cdiv(rows, SKINNY_ROWS), dtype=torch.int32, device=device)


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """Take the lower and upper 16 bits of words as floats of DTYPE."""
    return pairs.to(tl.int16).to(DTYPE, bitcast=True), (pairs >> 16).to(tl.int16).to(
        DTYPE, bitcast=True
    )


@triton.jit
def less(number, other):
    """Subtract ``number - other`` in their dtype."""
    if WIDEN:
        return (number.to(tl.float32) - other.to(tl.float32)).to(number.dtype)
    return number - other


@triton.jit
def operand(low, high, ROWS: tl.constexpr):
    """Arrange pairs [ROWS, 16] as [ROWS, 32], in an order in which each thread multiplies what it
    has loaded, 16 bytes of words, and nothing moves; weights and activations are brought into the
    same order.
    """
    tile = tl.reshape(tl.join(low, high), (ROWS, 4, 4 // SIDE_BY_SIDE, 2 * SIDE_BY_SIDE))
    return tl.reshape(tl.permute(tile, (0, 2, 1, 3)), (ROWS, 32))


@triton.jit
def load_pairs(x, column, k, APART: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load activations [32, M] of 16 columns, and of those APART from them, for pointers to tokens
    [M, 1].
    """
    # As many as words in a load: the layouts agree, and nothing moves between threads.
    column = tl.max_contiguous(column[None, :], (1, 4))
    if WHOLE:
        low, high = tl.load(x + column), tl.load(x + column + APART)
    else:
        low = tl.load(x + column, mask=column < k, other=0)
        high = tl.load(x + column + APART, mask=column + APART < k, other=0)
    return tl.trans(operand(low, high, BLOCK_M))


@triton.jit
def present(unit, units, WHOLE: tl.constexpr):
    """Return a unit, or the last one for those beyond it, whose activations are loaded as zeros."""
    return unit if WHOLE else tl.minimum(unit, units - 1)


@triton.jit
def last_to_arrive(arrived, programs):
    """Check whether this program is the last of `programs` to arrive at a counter, which it then
    resets to zero. It sees what the others have stored if it reads past the processor's cache.
    """
    # All threads have to store before one of them announces it.
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def store_product(
    product, bias, out, parts, arrived, m, n, row, token, BIAS: tl.constexpr, JOINED: tl.constexpr
):
    """Store products [N, M]; JOINED those of several programs that share rows, whose parts the
    last one adds up.
    """
    safe = tl.where(row < n, row, 0)
    at = token[None, :].to(tl.int64) * n + row[:, None]
    mask = (token < m)[None, :] & (row < n)[:, None]
    if JOINED:
        # Triton passes an argument of 1 as a Python integer, which has no `to`.
        size = tl.cast(m, tl.int64) * n
        splits = tl.num_programs(1)
        tl.store(parts + tl.program_id(1) * size + at, product, mask=mask)
        if last_to_arrive(arrived + tl.program_id(0), splits):
            total = tl.zeros(product.shape, tl.float32)
            # In order, whichever program arrives last: the same bits each time.
            for split in tl.range(0, splits):
                total += tl.load(
                    parts + split * size + at, mask=mask, other=0, cache_modifier=".cg"
                )
            if BIAS:
                total += tl.load(bias + safe)[:, None].to(tl.float32)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
    else:
        if BIAS:
            product += tl.load(bias + safe)[:, None].to(tl.float32)
        tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def int4_skinny_tile(
    x,
    words,
    scale,
    zero,
    safe,
    k,
    units,
    base,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Multiply rows [N, 1] of 4 bits in groups by pointers to tokens [M, 1], to [N, M], of this
    program's columns; `base` is that of `base_bits`.
    """
    PARTS: tl.constexpr = 128 // GROUP
    DTYPE: tl.constexpr = x.dtype.element_ty
    OFFSET: tl.constexpr = 128.0 if x.dtype.element_ty == tl.bfloat16 else 1024.0
    run = tl.arange(0, 16)
    ones = tl.full((BLOCK_N, 32), 1.0, DTYPE)
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first, last = unit_range(units, UNITS, 1)
    for start in tl.range(first, last, UNITS):
        for ahead in tl.static_range(UNITS):
            unit = start + ahead
            here = present(unit, units, WHOLE)
            tile = tl.load(words + safe * (units * 16) + here * 16 + run[None, :])
            for part in tl.static_range(PARTS):
                biased = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                for pair in tl.static_range(part * 4 // PARTS, (part + 1) * 4 // PARTS):
                    low, high = halves(((tile >> 4 * pair) & 0x000F000F) | base, DTYPE)
                    tokens = load_pairs(x, unit * 128 + pair * 32 + run, k, 16, WHOLE, BLOCK_M)
                    biased = dot_add(operand(low, high, BLOCK_N), tokens, biased)
                    total = dot_add(ones, tokens, total)
                group = safe * (units * PARTS) + here * PARTS + part
                step = tl.load(scale + group).to(tl.float32)
                centre = 8.0 if SYMMETRIC else tl.load(zero + group).to(tl.float32)
                product += step * (biased - (OFFSET + centre) * total)
    return product


@triton.jit
def int8_skinny_tile(
    x,
    words,
    scale,
    safe,
    k,
    units,
    base,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Multiply as `int4_skinny_tile`, for 8 bits with one scale a row."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    SHORT: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    run = tl.arange(0, 16)
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first, last = unit_range(units, UNITS, 1)
    for start in tl.range(first, last, UNITS):
        for half in tl.static_range(2 * UNITS):
            unit = start + half // 2
            tile = tl.load(
                words
                + safe * (units * 32)
                + present(unit, units, WHOLE) * 32
                + half % 2 * 16
                + run[None, :]
            )
            for pair in tl.static_range(2):
                codes = tile >> 8 * pair
                if SHORT:
                    # bfloat16 has 7 bits for a code: the eighth one chooses what is subtracted.
                    low, high = halves((codes & 0x007F007F) | base, DTYPE)
                    low_base, high_base = halves((~codes & 0x00800080) | base, DTYPE)
                else:
                    low, high = halves((codes & 0x00FF00FF) | base, DTYPE)
                    # 1024, which lies under a code, and 128.
                    low_base = tl.full((BLOCK_N, 16), 1152.0, DTYPE)
                    high_base = low_base
                weight = operand(less(low, low_base), less(high, high_base), BLOCK_N)
                column = unit * 128 + pair * 32 + half % 2 * 16 + run
                tokens = load_pairs(x, column, k, 64, WHOLE, BLOCK_M)
                product = dot_add(weight, tokens, product)
    return product * tl.load(scale + safe).to(tl.float32)


@triton.jit
def skinny_tile(
    x,
    words,
    scale,
    zero,
    safe,
    m,
    k,
    units,
    base,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Multiply rows [N] by tokens [M, K], to [N, M], of this program's columns; codes of 8 bits
    where GROUP is 0.
    """
    token = tl.arange(0, BLOCK_M)
    x += (tl.where(token < m, token, 0) * k)[:, None]
    safe = safe[:, None]
    if GROUP == 0:
        product = int8_skinny_tile(
            x, words, scale, safe, k, units, base, WHOLE, BLOCK_M, BLOCK_N, UNITS
        )
    else:
        product = int4_skinny_tile(
            x,
            words,
            scale,
            zero,
            safe,
            k,
            units,
            base,
            GROUP,
            SYMMETRIC,
            WHOLE,
            BLOCK_M,
            BLOCK_N,
            UNITS,
        )
    return product


@triton.jit
def skinny(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    parts,
    arrived,
    m,
    n,
    k,
    units,
    base,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    JOINED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Compute ``x @ weight.T + bias``; codes of 8 bits where GROUP is 0."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.where(row < n, row, 0)
    product = skinny_tile(
        x,
        words,
        scale,
        zero,
        safe,
        m,
        k,
        units,
        base,
        GROUP,
        SYMMETRIC,
        WHOLE,
        BLOCK_M,
        BLOCK_N,
        UNITS,
    )
    store_product(
        product, bias, out, parts, arrived, m, n, row, tl.arange(0, BLOCK_M), BIAS, JOINED
    )


def skinny_product(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group: int | None,
    arrived: Tensor,
    config: TileConfig,
) -> Tensor:
    """Compute ``x @ weight.T + bias`` for up to `block_m` tokens of bfloat16 or float16; arguments
    as for the operators. `arrived` is from `counters`.
    """
    m, k = x.shape
    n = len(scale)
    if group is None:
        units = words.shape[1] // 32
    else:
        units = words.shape[1] // 16
    joined = config.split > 1
    out = x.new_empty(m, n)
    # Without parts to join, nothing is stored in them.
    parts = out
    if joined:
        parts = x.new_empty(config.split, m, n, dtype=torch.float32)
    # A kernel takes no None: the scale stands for zero points or a bias that it does not read.
    grid = triton.cdiv(n, config.block_n), config.split
    wrap_triton(skinny)[grid](
        x.contiguous(),
        words,
        scale,
        scale if zero is None else zero,
        scale if bias is None else bias,
        out,
        parts,
        arrived,
        m,
        n,
        k,
        units,
        base_bits(x.dtype),
        group or 0,
        zero is None,
        bias is not None,
        joined,
        k % (UNIT * config.units) == 0,
        **config.constants(),
    )
    return out
