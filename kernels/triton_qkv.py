"""Queries, keys and values of up to 16 tokens in one launch: the product, and for each head what
follows it.

The last program to arrive of those that share a head adds up its sums, applies the norm that came
before the product, bias, limits, the head's own norm and rotary positions, and stores a query, or a
key or value in the cache.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels import triton_projections as projections
from quantkit.kernels.triton_projections import complete, inverse_rms, store_part, sum_parts
from quantkit.kernels.triton_skinny import base_bits, skinny_tile
from quantkit.kernels.triton_words import operator

# A float that it is added to keeps no fraction.
_WHOLE = tl.constexpr(1.5 * 2.0**23)
# Values of half a head, all parts of some tokens, that a program adds up at a time.
_VALUES = 1024


@triton.jit
def clip_values(values, CLIP: tl.constexpr):
    """Limit values to CLIP either way; NaN stays NaN."""
    return tl.where(values > CLIP, CLIP, tl.where(values < -CLIP, -CLIP, values))


@triton.jit
def store_halves(stored, at, first, second, inside, SIZE: tl.constexpr):
    """Store the halves [T, SIZE / 2] of rows [T]."""
    place = at[:, None] * SIZE + tl.arange(0, first.shape[1])[None, :]
    tl.store(stored + place, first.to(stored.dtype.element_ty), mask=inside)
    tl.store(stored + place + SIZE // 2, second.to(stored.dtype.element_ty), mask=inside)


@triton.jit
def codes_of(values, step):
    """Divide values by steps and round to the nearest integers, to even ones between two."""
    # An exact division and torch's rounding, so that the codes equal those of `to_cached_rows`.
    return ((tl.div_rn(values, step) + _WHOLE) - _WHOLE).to(tl.int8)


@triton.jit
def store_cached(stored, scales, at, first, second, inside, mask, SIZE: tl.constexpr):
    """Store the halves of rows in a cache: floats, or codes and their scales as `to_cached_rows`
    has them.
    """
    if stored.dtype.element_ty == tl.int8:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
        # Zero, or NaN if a value is not finite: the scale of such a row is NaN.
        broken = tl.sum(first * 0.0 + second * 0.0, 1)
        tl.store(scales + at, scale + broken, mask=mask)
        step = tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], first.shape)
        first, second = codes_of(first, step), codes_of(second, step)
    store_halves(stored, at, first, second, inside, SIZE)


@triton.jit
def project_heads(
    x,
    squares,
    words,
    scale,
    zero,
    bias,
    norms,
    cosine,
    sine,
    query_scale,
    positions,
    slots,
    queries,
    keys,
    key_scales,
    values,
    value_scales,
    parts,
    arrived,
    growth,
    m,
    n,
    k,
    units,
    base,
    blocks,
    tokens,
    heads,
    kv_heads,
    length,
    stride,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    NORMS: tl.constexpr,
    ROTARY: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    SLOTS: tl.constexpr,
    CLIP: tl.constexpr,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Compute rows of one head; those of queries come first, then keys, then values.

    EACH tokens are finished at a time.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    product = skinny_tile(
        x,
        words,
        scale,
        zero,
        row,
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
    store_part(parts, product, m, n, row, BLOCK_M)
    head = tl.program_id(0) // (SIZE // BLOCK_N)
    if complete(arrived + head, SIZE // BLOCK_N * SPLIT):
        turned = head < heads + kv_heads
        column = tl.broadcast_to(tl.arange(0, HALF)[None, :], (EACH, HALF))
        for start in tl.range(0, m, EACH):
            token = start + tl.arange(0, EACH)
            there = token < m
            inside = there[:, None] & (column < SIZE // 2)
            turns = there[:, None] & (column < tl.where(turned, SIZE // 2, 0))
            line = tl.broadcast_to(token[:, None], (EACH, HALF))
            factor = inverse_rms(squares, token, there, blocks, k, EPS, EACH)[:, None] * growth
            first = sum_parts(parts, m, n, line, head * SIZE + column, inside, SPLIT) * factor
            second = (
                sum_parts(parts, m, n, line, head * SIZE + SIZE // 2 + column, inside, SPLIT)
                * factor
            )
            if BIAS:
                first += tl.load(bias + head * SIZE + column, mask=inside, other=0).to(tl.float32)
                second += tl.load(bias + head * SIZE + SIZE // 2 + column, mask=inside, other=0).to(
                    tl.float32
                )
            if CLIP > 0:
                first, second = clip_values(first, CLIP), clip_values(second, CLIP)
            if NORMS:
                own = norms + tl.where(head < heads, 0, SIZE) + column
                inverse = tl.rsqrt(tl.sum(first * first + second * second, 1) / SIZE + EPS)
                inverse = tl.where(turned, inverse, 1.0)[:, None]
                first *= inverse * tl.load(own, mask=turns, other=1)
                second *= inverse * tl.load(own + SIZE // 2, mask=turns, other=1)
            sequence, place = token // tokens, token % tokens
            if ROTARY:
                angle = (sequence * stride + place)[:, None] * SIZE + column
                low, high = first, second
                first = low * tl.load(cosine + angle, mask=turns, other=1)
                first -= high * tl.load(sine + angle, mask=turns, other=0)
                second = high * tl.load(cosine + angle + SIZE // 2, mask=turns, other=1)
                second += low * tl.load(sine + angle + SIZE // 2, mask=turns, other=0)
            if head < heads:
                if QUERY_SCALE:
                    scaled = tl.load(query_scale + sequence * stride + place, mask=there, other=1)[
                        :, None
                    ]
                    first, second = first * scaled, second * scaled
                store_halves(
                    queries, (sequence * heads + head) * tokens + place, first, second, inside, SIZE
                )
            else:
                position = tl.load(positions + sequence * stride + place, mask=there, other=0).to(
                    tl.int64
                )
                slot = sequence.to(tl.int64)
                if SLOTS:
                    slot = tl.load(slots + sequence, mask=there, other=0).to(tl.int64)
                pair = slot * kv_heads + (head - heads) % kv_heads
                at = pair * length + position
                if turned:
                    store_cached(keys, key_scales, at, first, second, inside, there, SIZE)
                else:
                    store_cached(values, value_scales, at, first, second, inside, there, SIZE)


def _fill_missing(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    if tensor is None:
        return stand_in
    return tensor


def _empty_queries(
    x: Tensor, squares: object, words: object, scale: Tensor, *arguments: Any
) -> Tensor:
    # By position: `keys` is the last but three, and `batch` comes before it.
    batch = arguments[-5]
    keys = arguments[-4]
    kv_heads = keys.shape[1]
    size = keys.shape[3]
    return x.new_empty(batch, len(scale) // size - 2 * kv_heads, len(x) // batch, size)


@operator(
    "projected_heads",
    _empty_queries,
    mutates=("keys", "key_scales", "values", "value_scales", "arrived"),
)
def project_qkv(
    x: Tensor,
    squares: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    arrived: Tensor,
    group: int,
    eps: float,
    growth: float,
    norms: Tensor | None,
    clip: float,
    cosine: Tensor | None,
    sine: Tensor | None,
    query_scale: Tensor | None,
    positions: Tensor,
    slots: Tensor | None,
    batch: int,
    keys: Tensor,
    key_scales: Tensor | None,
    values: Tensor,
    value_scales: Tensor | None,
) -> Tensor:
    """Compute queries [B, H, T, Dh] of normed hidden states; store their keys and values in the
    cache.

    Args:
        x: hidden states weighted by the norm's weights, [B * T, D].
        squares: sums of squares, float32 [B * T, blocks], that make up those of each one's hidden
            states.
        words, scale, zero, bias, arrived, group: of queries, keys and values, as for
            `project_and_add`.
        eps, growth: of the norm, and what its weights were divided by.
        norms: weights of the norms of queries' and keys' heads, float32 [2, Dh], or None.
        clip: the largest absolute value of queries, keys and values; 0 for any.
        cosine, sine: of rotary positions, float32 [T, Dh] or [B, T, Dh]; None for none.
        query_scale: factors of queries, float32 [T] or [B, T], or None.
        positions, slots, keys, key_scales, values, value_scales: as for `attend_to_cache`.
        batch: B.
    """
    m, k = x.shape
    n = len(scale)
    tokens = len(x) // batch
    kv_heads, length, size = keys.shape[1:]
    heads = n // size - 2 * kv_heads
    # The largest power of two that divides a head: a program's rows are of one head.
    config = projections.choose_skinny_config(x, n, group, block_n=size & -size)
    queries = x.new_empty(batch, heads, tokens, size)
    half = triton.next_power_of_2(size // 2)
    # Tokens that the last program finishes at a time.
    step = min(triton.next_power_of_2(m), max(1, _VALUES // (half * config.split)))
    # All sequences have the same positions, or each its own row of them.
    if positions.dim() == 1:
        stride = 0
    else:
        stride = tokens
    # A kernel takes no None. Without zero points and so on it does not read what stands for them.
    wrap_triton(project_heads)[(n // config.block_n, config.split)](
        x,
        squares,
        words,
        scale,
        _fill_missing(zero, scale),
        _fill_missing(bias, scale),
        _fill_missing(norms, scale),
        _fill_missing(cosine, scale),
        _fill_missing(sine, scale),
        _fill_missing(query_scale, scale),
        positions,
        _fill_missing(slots, positions),
        queries,
        keys,
        _fill_missing(key_scales, keys),
        values,
        _fill_missing(value_scales, values),
        projections.allocate_parts(x, n, config),
        arrived,
        growth,
        m,
        n,
        k,
        projections.count_units(words, group),
        base_bits(x.dtype),
        squares.shape[1],
        tokens,
        heads,
        kv_heads,
        length,
        stride,
        BIAS=bias is not None,
        NORMS=norms is not None,
        ROTARY=cosine is not None,
        QUERY_SCALE=query_scale is not None,
        SLOTS=slots is not None,
        CLIP=clip,
        EPS=eps,
        SIZE=size,
        HALF=half,
        EACH=step,
        **projections.tile_constants(x, group, zero, config),
    )
    return queries
