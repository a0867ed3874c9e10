"""Attention of a few queries over the live part of a static cache, in Triton.

The live part, from the first position that a query sees to the last, is cut into spans. Programs
take one each, with a separate softmax, and a second kernel joins them by their maxima and sums
(2112.05682), in a fixed order. Where the live part ends is read from the positions on the device:
the grid depends on shapes alone, so a step can be recorded, and programs whose span lies beyond it
end at once.

B batch, H heads, K KV heads, T queries, S positions of the cache, Dh head size. The H / K * T
queries [rows] that share a KV head lie side by side and are handled together, so its keys are read
once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from quantkit.kernels.triton_skinny import last_to_arrive
from quantkit.kernels.triton_tiles import GpuSpec, gpu_spec
from quantkit.kernels.triton_words import WIDEN, dot_add, operator

# Queries of one program.
_MAX_ROWS = 64
# Bytes of keys that a program holds at a time, and as many of values.
_TILE_BYTES = 1 << 14
# That one program can join.
_MAX_SPANS = 64
# Programs for each processor.
_WAVES = 2
MAX_CODE = tl.constexpr(127.0)
"""Of int8.

Times a row's scale it is the row's largest value, which float16 holds where it does not hold the
scale.
"""
LOG2_E = tl.constexpr(math.log2(math.e))
"""Exponentials are to the base of 2."""


class Tile(NamedTuple):
    """What one program holds: queries, positions of the cache, columns of both; and the stages
    of its loads.
    """

    block_m: int
    block_n: int
    block_d: int
    stages: int


@triton.jit
def live(
    positions,
    tokens,
    length,
    window,
    TOKENS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Find the first position that a query sees, the first beyond the last one, and the length of
    a span.
    """
    token = tl.arange(0, TOKENS)
    position = tl.load(positions + tl.where(token < tokens, token, 0)).to(tl.int32)
    first = tl.maximum(tl.min(position, 0) + 1 - window, 0)
    last = tl.minimum(tl.max(position, 0) + 1, length)
    return first, last, tl.cdiv(tl.cdiv(last - first, BLOCK_N), SPANS) * BLOCK_N


@triton.jit
def load_cached_rows(
    rows, at, inside, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr
):
    """Load rows [N, BLOCK_D] of a cache, floats or codes, as floats; zeros for those that are not
    inside.
    """
    column = tl.arange(0, BLOCK_D)[None, :]
    values = tl.load(
        rows + at[:, None] * SIZE + column, mask=inside[:, None] & (column < SIZE), other=0
    )
    if WIDEN and rows.dtype.element_ty == tl.int8:
        # Triton's interpreter does not convert integers to bfloat16.
        values = values.to(tl.float32)
    return values.to(DTYPE)


@triton.jit
def apply_softcap(scores, SOFTCAP: tl.constexpr):
    """Compute ``SOFTCAP * tanh(scores / SOFTCAP)``."""
    # tanh by one exponential: 1 - 2 / (1 + exp(2 x)).
    return SOFTCAP * (1 - 2 / (1 + tl.exp2(scores * (2 * LOG2_E / SOFTCAP))))


@triton.jit
def attend_span(
    queries,
    keys,
    key_scales,
    values,
    value_scales,
    positions,
    slots,
    mixed,
    largest,
    total,
    tokens,
    rows,
    length,
    window,
    kv_heads,
    stride,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to one span for up to BLOCK_M queries: store values weighted by exponentials, the
    largest score and the exponentials' sum; nothing for a span beyond the live part.

    SCALE is of products with keys, to scores to the base of 2, or with a SOFTCAP to the base of e.
    Codes are multiplied as they are: scales of keys are for their scores, and those of values for
    the weights.
    """
    DTYPE: tl.constexpr = queries.dtype.element_ty
    CODES: tl.constexpr = keys.dtype.element_ty == tl.int8
    pair = tl.program_id(2).to(tl.int64)
    sequence = pair // kv_heads
    positions += sequence * stride
    first, last, each = live(positions, tokens, length, window, TOKENS, SPANS, BLOCK_N)
    start = first + tl.program_id(0) * each
    if start < last:
        row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        safe = tl.where(row < rows, row, 0)
        line = pair * rows + safe
        column = tl.arange(0, BLOCK_D)[None, :]
        position = tl.load(positions + safe % tokens).to(tl.int32)[:, None]
        query = tl.load(queries + line[:, None] * SIZE + column, mask=column < SIZE, other=0)
        stored = pair
        if SLOTS:
            stored = tl.load(slots + sequence).to(tl.int64) * kv_heads + pair % kv_heads
        stored *= length
        keys, values = keys + stored * SIZE, values + stored * SIZE
        if CODES:
            key_scales, value_scales = key_scales + stored, value_scales + stored
        high = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_M,), tl.float32)
        weighted = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for block in tl.range(start, tl.minimum(start + each, last), BLOCK_N):
            at = block + tl.arange(0, BLOCK_N)
            key = load_cached_rows(keys, at, at < last, SIZE, BLOCK_D, DTYPE)
            scores = dot_add(query, tl.trans(key), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * SCALE
            if CODES:
                scores *= tl.load(key_scales + at, mask=at < last, other=0)[None, :]
            if SOFTCAP > 0:
                scores = apply_softcap(scores, SOFTCAP) * LOG2_E
            distance = position - at[None, :]
            scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
            higher = tl.maximum(high, tl.max(scores, 1))
            # For a query that has seen nothing yet, the difference would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            before = tl.exp2(high - base)
            sums = sums * before + tl.sum(weights, 1)
            if CODES:
                weights *= tl.load(value_scales + at, mask=at < last, other=0)[None, :] * MAX_CODE
            value = load_cached_rows(values, at, at < last, SIZE, BLOCK_D, DTYPE)
            if CODES and BLOCK_M < 64 and not WIDEN:
                # A multiplication by one: for values that are only loaded and converted, the dot
                # gathers codes one by one from shared memory; of products it takes pairs,
                # transposed on the way. With 64 rows it always takes pairs.
                value *= (at < last).to(DTYPE)[:, None]
            weighted = dot_add(weights.to(DTYPE), value, weighted * before[:, None])
            high = higher
        if CODES:
            weighted /= MAX_CODE
        part = line * SPANS + tl.program_id(0)
        tl.store(largest + part, high, mask=row < rows)
        tl.store(total + part, sums, mask=row < rows)
        tl.store(
            mixed + part[:, None] * SIZE + column,
            weighted,
            mask=(row < rows)[:, None] & (column < SIZE),
        )


@triton.jit
def join_line(
    line,
    positions,
    mixed,
    largest,
    total,
    sinks,
    out,
    tokens,
    heads,
    length,
    window,
    stride,
    SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the spans of one query, and its head's sink if there are any; store to [B, T, H, Dh]."""
    positions += line // (heads * tokens) * stride
    first, last, each = live(positions, tokens, length, window, TOKENS, SPANS, BLOCK_N)
    # At a time: more do not fit in registers next to attention's.
    COLUMNS: tl.constexpr = min(BLOCK_D, 64)
    span = tl.arange(0, BLOCK_S)
    # Nothing is written for spans beyond the live part.
    there = first + span * each < last
    part = line * SPANS + span
    high = tl.load(largest + part, mask=there, other=float("-inf"), cache_modifier=".cg")
    highest = tl.max(high, 0)
    if SINKS:
        sink = tl.load(sinks + line // tokens % heads).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2(high - base)
    sums = tl.sum(tl.load(total + part, mask=there, other=0, cache_modifier=".cg") * share, 0)
    if SINKS:
        sums += tl.exp2(sink - base)
    at = (line // (heads * tokens) * tokens + line % tokens) * heads + line // tokens % heads
    for start in tl.static_range(0, BLOCK_D, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = there[:, None] & (column < SIZE)[None, :]
        parts = tl.load(
            mixed + part[:, None] * SIZE + column[None, :], mask=mask, other=0, cache_modifier=".cg"
        )
        joined = tl.sum(parts * share[:, None], 0) / sums
        tl.store(out + at * SIZE + column, joined.to(out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def join_spans(
    positions,
    mixed,
    largest,
    total,
    sinks,
    out,
    tokens,
    heads,
    length,
    window,
    stride,
    SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the spans of one query for each program; see `join_line`."""
    join_line(
        tl.program_id(0).to(tl.int64),
        positions,
        mixed,
        largest,
        total,
        sinks,
        out,
        tokens,
        heads,
        length,
        window,
        stride,
        SINKS,
        SIZE,
        TOKENS,
        SPANS,
        BLOCK_N,
        BLOCK_S,
        BLOCK_D,
    )


@triton.jit
def attend_and_join(
    queries,
    keys,
    key_scales,
    values,
    value_scales,
    positions,
    slots,
    mixed,
    largest,
    total,
    sinks,
    out,
    arrived,
    tokens,
    rows,
    heads,
    length,
    window,
    kv_heads,
    stride,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOTS: tl.constexpr,
    SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to a span in each program; the last program to arrive joins them."""
    attend_span(
        queries,
        keys,
        key_scales,
        values,
        value_scales,
        positions,
        slots,
        mixed,
        largest,
        total,
        tokens,
        rows,
        length,
        window,
        kv_heads,
        stride,
        SCALE,
        SOFTCAP,
        SLOTS,
        SIZE,
        TOKENS,
        SPANS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    pair = tl.program_id(2).to(tl.int64)
    own = positions + pair // kv_heads * stride
    first, last, each = live(own, tokens, length, window, TOKENS, SPANS, BLOCK_N)
    if first + tl.program_id(0) * each < last:
        counter = arrived + tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        if last_to_arrive(counter, tl.cdiv(last - first, each)):
            start = tl.program_id(1) * BLOCK_M
            for row in tl.range(start, tl.minimum(start + BLOCK_M, rows)):
                join_line(
                    pair * rows + row,
                    positions,
                    mixed,
                    largest,
                    total,
                    sinks,
                    out,
                    tokens,
                    heads,
                    length,
                    window,
                    stride,
                    SINKS,
                    SIZE,
                    TOKENS,
                    SPANS,
                    BLOCK_N,
                    BLOCK_S,
                    BLOCK_D,
                )


@operator(
    "cached_attention",
    lambda q, *_: q.new_empty(len(q), q.shape[2], q.shape[1] * q.shape[3]),
    ("arrived",),
)
def attend_to_cache(
    queries: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    values: Tensor,
    value_scales: Tensor | None,
    positions: Tensor,
    slots: Tensor | None,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    arrived: Tensor | None,
    spans: int | None,
) -> Tensor:
    """Compute grouped-query attention; each query sees the positions cached in its sequence's slot
    up to its own.

    Positions before or beyond all that the queries see are never read. Products are of the queries'
    dtype, sums and the softmax of float32.

    Args:
        queries: [B, H, T, Dh], for a few T.
        keys, values: [slots, K, S, Dh], floats or int8 codes.
        key_scales, value_scales: of the codes of each row, float32 [slots, K, S]; None for floats.
        positions: [T] or [B, T], each below S.
        slots: of the sequences, [B]; None is 0, 1, 2, ...
        window: positions seen, the own included; None for all.
        scale: of products of queries and keys; None is 1 over the root of Dh.
        softcap: the bound of scores, see `apply_softcap`; None for no bound.
        sinks: a score of each head that has no value, [H]; None for none.
        arrived: from `attention_counters`, for one launch, in which the last program joins the
            spans; None is two.
        spans: at most as many parts of the cache; None is as many as suit the GPU.

    Returns:
        [B, T, H * Dh] in the queries' dtype.
    """
    batch, heads, tokens, size = queries.shape
    kv_heads, length = keys.shape[1:3]
    pairs = batch * kv_heads
    rows = heads // kv_heads * tokens
    gpu = gpu_spec(queries.device)
    tile = choose_tile(rows, size, queries.dtype, gpu)
    spans = spans or count_spans(pairs, rows, length, tile, gpu)
    mixed = queries.new_empty(pairs * rows, spans, size, dtype=torch.float32)
    parts = mixed, mixed.new_empty(pairs * rows, spans), mixed.new_empty(pairs * rows, spans)
    out = queries.new_empty(batch, tokens, heads * size)
    if window is None:
        window = length
    # All sequences read the same positions, or each its own row of them.
    if positions.dim() == 1:
        stride = 0
    else:
        stride = tokens
    if scale is None:
        scale = size**-0.5
    # The kernel applies a soft cap to the base of e, and changes the base after it.
    if softcap:
        score_scale = scale
    else:
        score_scale = scale * LOG2_E.value
    constants = {
        "SIZE": size,
        "TOKENS": triton.next_power_of_2(tokens),
        "SPANS": spans,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": tile.block_d,
    }
    of_spans = {
        "SCALE": score_scale,
        "SOFTCAP": softcap or 0.0,
        "SLOTS": slots is not None,
        "BLOCK_M": tile.block_m,
        "num_stages": tile.stages,
    }
    of_join = {"SINKS": sinks is not None, "BLOCK_S": triton.next_power_of_2(spans)}
    grid = spans, triton.cdiv(rows, tile.block_m), pairs
    keys = keys.contiguous()
    values = values.contiguous()
    # A kernel takes no None. It reads none of these stand-ins: of floats, without SLOTS or SINKS.
    inputs = (
        queries.contiguous(),
        keys,
        keys if key_scales is None else key_scales.contiguous(),
        values,
        values if value_scales is None else value_scales.contiguous(),
        positions,
        positions if slots is None else slots,
    )
    if sinks is None:
        sinks = mixed
    if arrived is not None:
        wrap_triton(attend_and_join)[grid](
            *inputs,
            *parts,
            sinks,
            out,
            arrived,
            tokens,
            rows,
            heads,
            length,
            window,
            kv_heads,
            stride,
            **of_spans,
            **of_join,
            **constants,
            num_warps=4,
        )
        return out
    wrap_triton(attend_span)[grid](
        *inputs,
        *parts,
        tokens,
        rows,
        length,
        window,
        kv_heads,
        stride,
        **of_spans,
        **constants,
        num_warps=4,
    )
    wrap_triton(join_spans)[(pairs * rows,)](
        positions,
        *parts,
        sinks,
        out,
        tokens,
        heads,
        length,
        window,
        stride,
        **of_join,
        **constants,
        num_warps=4,
        num_stages=1,
    )
    return out


def choose_tile(rows: int, size: int, dtype: torch.dtype, gpu: GpuSpec) -> Tile:
    """Choose the tile for queries [rows, size] of a dtype that share keys."""
    # Tensor cores take at least 16 rows and columns, and Triton powers of two.
    block_d = max(16, triton.next_power_of_2(size))
    block_n = _TILE_BYTES // (block_d * dtype.itemsize)
    # Each stage holds a tile of keys and one of values; as much as one tile stays free.
    stages = min(3, max(1, (gpu.shared_memory - _TILE_BYTES) // (2 * _TILE_BYTES)))
    return Tile(
        min(_MAX_ROWS, max(16, triton.next_power_of_2(rows))),
        min(128, max(16, block_n)),
        block_d,
        stages,
    )


def count_spans(pairs: int, rows: int, length: int, tile: Tile, gpu: GpuSpec) -> int:
    """Count the programs that share a cache of `length` positions: as many as fit on the
    processors.
    """
    fitting = triton.cdiv(_WAVES * gpu.processors, pairs * triton.cdiv(rows, tile.block_m))
    return int(min(fitting, triton.cdiv(length, tile.block_n), _MAX_SPANS))


def attention_counters(tokens: int, heads: int, kv_heads: int, device: torch.device) -> Tensor:
    """Allocate counters of the programs that have arrived, for up to `tokens` tokens: int32 zeros
    before and after a launch.
    """
    count = kv_heads * (tokens + heads // kv_heads * tokens // _MAX_ROWS)
    return torch.zeros(count, dtype=torch.int32, device=device)
