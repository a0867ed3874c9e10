"""Which tokens attend to which: the new ones to each other, or to all that a cache holds.

B batch, T new positions, S positions of the cache, H heads, K KV heads, Dh head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.model.cache import KVCache, cached_floats

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer, queries [B, H, T, Dh], keys and values [B, K, T, Dh] to mixed values [B, T, H * Dh]."""

CachedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int | None], Tensor]
"""Queries [B, H, T, Dh], cached keys and values [slots, K, S, Dh] as stored, the queries' positions, [T] or [B, T],
the sequences' slots [B], None for 0, 1, 2, ..., and the window to mixed values [B, T, H * Dh]; each query sees the
positions of its slot up to its own."""


def causal_attention(positions: Tensor, windows: Sequence[int | None]) -> Attend:
    """Each of the tokens at rising positions, [T] or [B, T], sees itself and those of its sequence before it."""
    masks = {window: _window_mask(positions, window) for window in set(windows)}

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mask = masks[windows[layer]]
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)

    return attend


def prefill_attention(
    cache: KVCache, positions: Tensor, windows: Sequence[int | None], slots: Tensor | None = None
) -> Attend:
    """As `causal_attention`, of the first tokens there are; keys and values go into the cache."""
    attend_to_each_other = causal_attention(positions, windows)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache.update(layer, positions, keys, values, slots)
        return attend_to_each_other(layer, queries, keys, values)

    return attend


def cached_attention(
    cache: KVCache, positions: Tensor, windows: Sequence[int | None], attention: CachedAttention,
    slots: Tensor | None = None,
) -> Attend:  # fmt: skip
    """Each token sees all that the cache holds of its sequence up to it."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        stored = cache.update(layer, positions, keys, values, slots)
        return attention(queries, *stored, positions, slots, windows[layer])

    return attend


def masked_attention(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor | None, window: int | None
) -> Tensor:
    """The `CachedAttention` of torch, under a mask: over the whole cache, or on a CPU over what is seen."""
    if type(positions) is Tensor and positions.device.type == "cpu" and not torch.compiler.is_compiling():
        seen = int(positions.max()) + 1
        keys, values = keys[:, :, :seen], values[:, :, :seen]
    if slots is not None:
        keys, values = keys.index_select(0, slots), values.index_select(0, slots)
    mask = _causal_mask(positions, torch.arange(keys.shape[2], device=positions.device), window)
    keys, values = cached_floats(keys, queries.dtype), cached_floats(values, queries.dtype)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def for_few_tokens(attention: CachedAttention, max_tokens: int) -> CachedAttention:
    """A `CachedAttention` for up to `max_tokens` tokens at a time, with torch's for more."""

    def chosen(
        queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor | None, window: int | None
    ) -> Tensor:
        few = queries.shape[2] <= max_tokens
        return (attention if few else masked_attention)(queries, keys, values, positions, slots, window)

    return chosen


def _window_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """Which of the positions each sees: bool [T, T] or [B, 1, T, T]; None where that is all up to its own."""
    return None if window is None else _causal_mask(positions, positions, window)


def _causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions each query position sees: bool [T, S] for [T] and [S], or [B, 1, T, S] for [B, T] and [S] or
    [B, S]."""
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return seen if seen.dim() == 2 else seen.unsqueeze(1)
