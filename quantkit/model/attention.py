"""Which tokens attend to which: the new ones to each other, or to all that a cache holds.

B batch, T new positions, S positions of the cache, H heads, K KV heads, Dh head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.model.cache import KVCache
from quantkit.tensors.cached_rows import CachedRows, to_cached_rows

MAX_QUERY_ROWS = 2048
"""With more positions than this, masks and scores are computed for some queries at a time,
because their size grows with the square of the number of positions. That is so in eager steps on a
CPU without a cache, for layers with a window, a softcap or sinks.
"""
# The size of the scores of one chunk. For larger tensors, the allocator requests memory from the
# system each time instead of reusing its own.
SCORES_BYTES = 16 << 20


@dataclass(frozen=True)
class ScoreSettings:
    """How products of queries and keys become shares of attention.

    Attributes:
        scale: multiplies the products; None is 1 over the root of the head size.
        softcap: bounds the scores, softcap * tanh(score / softcap); None for no bound.
        sinks: one score per head that takes a share of attention and adds no value, [H]; None
            for no sinks.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Return whether torch's fused attention computes them: it knows no caps and no sinks."""
        return self.softcap is None and self.sinks is None


PLAIN = ScoreSettings()


@dataclass(frozen=True)
class Chunk:
    """A chunk of positions, of which `size` follow each other; the first begins at position 0."""

    size: int


Span = int | Chunk | None
"""What a query sees: the positions of a window, those of its chunk up to its own, or all up to its
own.
"""

Attend = Callable[[int, Tensor, Tensor, Tensor, ScoreSettings], Tensor]
"""Layer, queries [B, H, T, Dh], keys and values [B, K, T, Dh] to mixed values [B, T, H * Dh]."""


class CachedAttention(Protocol):
    """Attention over a cache."""

    def __call__(
        self,
        queries: Tensor,
        keys: CachedRows,
        values: CachedRows,
        positions: Tensor,
        slots: Tensor | None,
        window: int | None,
        scores: ScoreSettings = PLAIN,
    ) -> Tensor:
        """Mix the cached values [slots, K, S, Dh] for queries [B, H, T, Dh] into [B, T, H * Dh].
        Each query sees the positions of its slot up to its own.

        Args:
            positions: the queries', [T] or [B, T].
            slots: the sequences' slots [B]; None for 0, 1, 2, ...
            window: how many positions back a query sees, itself included; None for all.
        """
        ...


def make_causal_attention(
    positions: Tensor, spans: Sequence[Span], cache_dtype: torch.dtype | None = None
) -> Attend:
    """Build attention without a cache for tokens at rising positions, [T] or [B, T]: each sees
    itself and those of its sequence before it. Keys and values are rounded as a cache of type
    `cache_dtype` stores them; None does not round them.
    """
    spans = _drop_first_chunks(spans, positions)
    long = positions.shape[-1] > MAX_QUERY_ROWS and _eager_on_cpu(positions)
    # Layers with the same span share one mask. Parts of long inputs make their own masks.
    masks: dict[Span, Tensor | None] = {}
    if not long:
        for span in set(spans):
            if span is None:
                # Selects `is_causal` of torch's fused attention, which needs no mask in memory.
                masks[span] = None
            else:
                masks[span] = _causal_mask(positions, positions, span)

    def attend(
        layer: int, queries: Tensor, keys: Tensor, values: Tensor, scores: ScoreSettings
    ) -> Tensor:
        if cache_dtype is not None:
            keys = to_cached_rows(keys, cache_dtype).floats(keys.dtype)
            values = to_cached_rows(values, cache_dtype).floats(values.dtype)
        if long and not (spans[layer] is None and scores.plain):
            return _mix_values_in_parts(queries, keys, values, positions, spans[layer], scores)
        mask = masks.get(spans[layer])
        # Softcaps and sinks are computed step by step, which needs an explicit mask.
        if mask is None and not scores.plain:
            mask = _causal_mask(positions, positions, None)
        return _mix_values(queries, keys, values, mask, scores)

    return attend


def make_cached_attention(
    cache: KVCache,
    positions: Tensor,
    spans: Sequence[Span],
    attention: CachedAttention,
    slots: Tensor | None = None,
    *,
    is_prefill: bool = False,
) -> Attend:
    """Build attention that stores keys and values in the cache: each token sees all cached
    positions of its sequence up to its own. With `is_prefill`, the cache has no earlier positions
    of these sequences, so the tokens attend to each other as in `make_causal_attention`.
    """
    spans = _drop_first_chunks(spans, positions, cache.length)
    if is_prefill:
        to_each_other = make_causal_attention(positions, spans)
    else:
        to_each_other = None

    def attend(
        layer: int, queries: Tensor, keys: Tensor, values: Tensor, scores: ScoreSettings
    ) -> Tensor:
        stored = cache.update(layer, positions, keys, values, slots)
        if to_each_other is not None:
            return to_each_other(layer, queries, keys, values, scores)
        span = spans[layer]
        if isinstance(span, Chunk):
            # Kernels compute windows only.
            return attend_with_mask(queries, *stored, positions, slots, span, scores)
        return attention(queries, *stored, positions, slots, span, scores)

    return attend


def attend_with_mask(
    queries: Tensor,
    keys: CachedRows,
    values: CachedRows,
    positions: Tensor,
    slots: Tensor | None,
    window: Span,
    scores: ScoreSettings = PLAIN,
) -> Tensor:
    """Run the `CachedAttention` of torch under a mask: over the whole cache, or on a CPU only over
    the positions up to the last query.
    """
    # Reading the largest position would synchronize with a GPU and break a compiled graph.
    if _eager_on_cpu(positions):
        cached_count = int(positions.max()) + 1
        keys = keys.up_to(cached_count)
        values = values.up_to(cached_count)
    if slots is not None:
        keys = keys.of_slots(slots)
        values = values.of_slots(slots)
    mask = _causal_mask(
        positions, torch.arange(keys.rows.shape[2], device=positions.device), window
    )
    return _mix_values(
        queries, keys.floats(queries.dtype), values.floats(queries.dtype), mask, scores
    )


def _mix_values(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: ScoreSettings
) -> Tensor:
    """Mix values into [B, T, H * Dh] under a mask; without one, each token sees those up to it."""
    if scores.plain:
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scores.scale,
            enable_gqa=True,
        )
        return mixed.transpose(1, 2).flatten(2)
    assert mask is not None
    # Queries that share a KV head side by side: [B, K, H / K, T, Dh]. The keys broadcast over the
    # third dimension, so they are not repeated.
    grouped = torch.unflatten(queries, 1, (keys.shape[1], -1))
    products = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).float()
    products = products * (queries.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    if mask.dim() != 2:
        # A dimension for the heads that share keys.
        mask = mask.unsqueeze(1)
    products = products.masked_fill(~mask, -torch.inf)
    if scores.sinks is None:
        shares = products.softmax(-1)
    else:
        # A sink takes part in the softmax like one more key, and its share is then dropped.
        sinks = scores.sinks.float().view(1, keys.shape[1], -1, 1, 1)
        sinks = sinks.expand(*products.shape[:-1], 1)
        shares = torch.cat((products, sinks), dim=-1).softmax(-1)[..., :-1]
    grouped_values: Tensor = shares.to(values.dtype) @ values.unsqueeze(2)
    return grouped_values.flatten(1, 2).transpose(1, 2).flatten(2)


def _mix_values_in_parts(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    span: Span,
    scores: ScoreSettings,
) -> Tensor:
    """Mix values into [B, T, H * Dh] for tokens at rising positions, [T] or [B, T]: for some
    queries of the heads that share keys at a time, over the keys that any of them sees.
    """
    batch, kv_heads, count, _ = keys.shape
    heads = queries.shape[1] // kv_heads
    # How many positions before its own a query sees at most.
    reach = span.size if isinstance(span, Chunk) else span
    if reach is None:
        keys_per_part = count
    else:
        keys_per_part = min(count, reach + MAX_QUERY_ROWS)
    # Scores are float32, 4 bytes each.
    bytes_per_query = 4 * batch * heads * keys_per_part
    size = min(MAX_QUERY_ROWS, max(1, SCORES_BYTES // bytes_per_query))
    mixed = torch.empty(
        batch, count, kv_heads, heads * queries.shape[-1], dtype=values.dtype, device=values.device
    )
    for start in range(0, count, size):
        stop = min(start + size, count)
        # Positions rise by at least one, so no key before this index is within the reach.
        if reach is None:
            first_key = 0
        else:
            first_key = max(0, start - reach + 1)
        mask = _causal_mask(positions[..., start:stop], positions[..., first_key:stop], span)
        for head in range(kv_heads):
            group = slice(head * heads, (head + 1) * heads)
            shared = slice(head, head + 1)
            parts = (
                queries[:, group, start:stop],
                keys[:, shared, first_key:stop],
                values[:, shared, first_key:stop],
            )
            if scores.sinks is None:
                sinks = None
            else:
                sinks = scores.sinks[group]
            mixed[:, start:stop, head] = _mix_values(*parts, mask, replace(scores, sinks=sinks))
    return mixed.flatten(2)


def _drop_first_chunks(
    spans: Sequence[Span], positions: Tensor, length: int | None = None
) -> Sequence[Span]:
    """Replace chunks by all positions where no token is beyond the first chunk, in which it sees
    the same; `length` is that of the cache, if there is one.
    """
    if not any(isinstance(span, Chunk) for span in spans):
        return spans
    count = length
    # Reading the largest position would synchronize with a GPU and break a compiled graph.
    if _eager_on_cpu(positions):
        count = int(positions.max()) + 1
    if count is None:
        return spans
    dropped: list[Span] = []
    for span in spans:
        is_first = isinstance(span, Chunk) and count <= span.size
        dropped.append(None if is_first else span)
    return dropped


def _eager_on_cpu(positions: Tensor) -> bool:
    # Tracers, such as torchax's, are subclasses of Tensor whose values cannot be read.
    if type(positions) is not Tensor or positions.device.type != "cpu":
        return False
    return not torch.compiler.is_compiling()


def _causal_mask(queries: Tensor, keys: Tensor, span: Span) -> Tensor:
    """Mark the key positions that each query position sees: bool [T, S] for [T] and [S], or [B, 1,
    T, S] for [B, T] and [S] or [B, S].
    """
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    visible = distance >= 0
    if isinstance(span, Chunk):
        visible &= queries.unsqueeze(-1) // span.size == keys.unsqueeze(-2) // span.size
    elif span is not None:
        visible &= distance < span
    if visible.dim() == 2:
        return visible
    return visible.unsqueeze(1)
