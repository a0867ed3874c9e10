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
"""Positions beyond which masks and scores, which grow with their square, are made for a piece of
them at a time.
"""
SCORES_BYTES = 16 << 20  # of a piece; what is larger is taken from the system each time anew


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys become shares of attention.

    Attributes:
        scale: what they are multiplied by; None is 1 over the root of the head size.
        softcap: what they are bent to stay below, softcap * tanh(score / softcap); None for no
            bound.
        sinks: a score of each head that takes a share and gives no value, [H]; None for none.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Return whether torch's fused attention computes them: it knows no caps and no sinks."""
        return self.softcap is None and self.sinks is None


PLAIN = Scores()

Attend = Callable[[int, Tensor, Tensor, Tensor, Scores], Tensor]
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
        scores: Scores = PLAIN,
    ) -> Tensor:
        """Mixed values [B, T, H * Dh] of queries [B, H, T, Dh] over cached keys and values [slots,
        K, S, Dh]; each query sees the positions of its slot up to its own.

        Args:
            positions: the queries', [T] or [B, T].
            slots: the sequences' slots [B]; None for 0, 1, 2, ...
            window: how many positions back a query sees, itself included; None for all.
        """
        ...


def make_causal_attention(
    positions: Tensor, windows: Sequence[int | None], cache_dtype: torch.dtype | None = None
) -> Attend:
    """Return each of the tokens at rising positions, [T] or [B, T], sees itself and those of its
    sequence before it, with keys and values as a cache of type `cache_dtype` stores them; None is
    as they are.
    """
    long = positions.shape[-1] > MAX_QUERY_ROWS and _eager_on_cpu(positions)
    limits = () if long else set(windows)
    masks = {}
    for window in limits:
        masks[window] = None if window is None else _causal_mask(positions, positions, window)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        if cache_dtype is not None:
            keys, values = (
                to_cached_rows(each, cache_dtype).floats(each.dtype) for each in (keys, values)
            )
        if long and not (windows[layer] is None and scores.plain):
            return _mix_values_in_chunks(queries, keys, values, positions, windows[layer], scores)
        mask = masks.get(windows[layer])
        if mask is None and not scores.plain:
            mask = _causal_mask(positions, positions, None)
        return _mix_values(queries, keys, values, mask, scores)

    return attend


def make_cached_attention(
    cache: KVCache,
    positions: Tensor,
    windows: Sequence[int | None],
    attention: CachedAttention,
    slots: Tensor | None = None,
    *,
    first: bool = False,
) -> Attend:
    """Stores keys and values in the cache; each token sees all that the cache holds of its sequence
    up to it. The `first` tokens, for which the cache holds nothing yet that they should see, attend
    as in `make_causal_attention`.
    """
    if first:
        to_each_other = make_causal_attention(positions, windows)
    else:
        to_each_other = None

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        stored = cache.update(layer, positions, keys, values, slots)
        if to_each_other is not None:
            return to_each_other(layer, queries, keys, values, scores)
        return attention(queries, *stored, positions, slots, windows[layer], scores)

    return attend


def attend_with_mask(
    queries: Tensor,
    keys: CachedRows,
    values: CachedRows,
    positions: Tensor,
    slots: Tensor | None,
    window: int | None,
    scores: Scores = PLAIN,
) -> Tensor:
    """Return the `CachedAttention` of torch, under a mask: over the whole cache, or on a CPU over
    what is seen.
    """
    if _eager_on_cpu(positions):
        seen = int(positions.max()) + 1
        keys = keys.up_to(seen)
        values = values.up_to(seen)
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
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    """Mixed values [B, T, H * Dh] under a mask, or each token seeing those up to it."""
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
    # [B, K, H / K, T, Dh]
    grouped = torch.unflatten(queries, 1, (keys.shape[1], -1))
    products = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).float()
    products = products * (queries.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    if mask.dim() == 2:
        mask = mask
    else:
        mask = mask.unsqueeze(1)
    products = products.masked_fill(~mask, -torch.inf)
    if scores.sinks is None:
        shares = products.softmax(-1)
    else:
        sinks = (
            scores.sinks.float().view(1, keys.shape[1], -1, 1, 1).expand(*products.shape[:-1], 1)
        )
        shares = torch.cat((products, sinks), dim=-1).softmax(-1)[..., :-1]
    given: Tensor = shares.to(values.dtype) @ values.unsqueeze(2)
    return given.flatten(1, 2).transpose(1, 2).flatten(2)


def _mix_values_in_chunks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    window: int | None,
    scores: Scores,
) -> Tensor:
    """Mixed values [B, T, H * Dh] of tokens at rising positions, [T] or [B, T]: of some queries of
    the heads that share keys at a time, with what any of them sees.
    """
    batch, kv_heads, count, _ = keys.shape
    heads = queries.shape[1] // kv_heads
    if window is None:
        seen = count
    else:
        seen = min(count, window + MAX_QUERY_ROWS)
    size = min(MAX_QUERY_ROWS, max(1, SCORES_BYTES // (4 * batch * heads * seen)))
    mixed = torch.empty(
        batch, count, kv_heads, heads * queries.shape[-1], dtype=values.dtype, device=values.device
    )
    for start in range(0, count, size):
        stop = min(start + size, count)
        # positions rise by one at least
        if window is None:
            first = 0
        else:
            first = max(0, start - window + 1)
        mask = _causal_mask(positions[..., start:stop], positions[..., first:stop], window)
        for head in range(kv_heads):
            own = slice(head * heads, (head + 1) * heads)
            shared = slice(head, head + 1)
            parts = (
                queries[:, own, start:stop],
                keys[:, shared, first:stop],
                values[:, shared, first:stop],
            )
            if scores.sinks is None:
                sinks = None
            else:
                sinks = scores.sinks[own]
            mixed[:, start:stop, head] = _mix_values(*parts, mask, replace(scores, sinks=sinks))
    return mixed.flatten(2)


def _eager_on_cpu(positions: Tensor) -> bool:
    return (
        type(positions) is Tensor
        and positions.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def _causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which key positions each query position sees: bool [T, S] for [T] and [S], or [B, 1,
    T, S] for [B, T] and [S] or [B, S].
    """
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if seen.dim() == 2:
        return seen
    return seen.unsqueeze(1)
