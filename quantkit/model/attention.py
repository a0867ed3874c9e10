"""Who attends to what: among the tokens given, or over a cache.

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

CachedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int | None], Tensor]
"""Queries [B, H, T, Dh], cached keys and values [B, K, S, Dh] as stored, the queries' positions [T] and
the window to mixed values [B, T, H * Dh]; each query sees the positions up to its own."""


def causal_attention(positions: Tensor, windows: Sequence[int | None]) -> Attend:
    """Each of the tokens at rising positions [T] sees itself and those before it."""
    masks = {window: _own_mask(positions, window) for window in set(windows)}

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        mask = masks[windows[layer]]
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)

    return attend


def causal_attention_into(cache: KVCache, positions: Tensor, windows: Sequence[int | None]) -> Attend:
    """As `causal_attention`, for the first tokens there are; keys and values go into the cache."""
    own = causal_attention(positions, windows)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache.update(layer, positions, keys, values)
        return own(layer, queries, keys, values)

    return attend


def cached_attention(
    cache: KVCache, positions: Tensor, windows: Sequence[int | None], lookup: CachedAttention
) -> Attend:
    """Each token sees all that the cache holds up to it."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        stored = cache.update(layer, positions, keys, values)
        return lookup(queries, *stored, positions, windows[layer])

    return attend


def masked_attention(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """A `CachedAttention` through torch, over the whole cache."""
    mask = _causal_mask(positions, torch.arange(keys.shape[2], device=positions.device), window)
    keys, values = cached_floats(keys, queries.dtype), cached_floats(values, queries.dtype)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def for_few(lookup: CachedAttention, most: int) -> CachedAttention:
    """A `CachedAttention` that is good for so many tokens at a time, with torch's for more."""

    def chosen(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None) -> Tensor:
        few = queries.shape[2] <= most
        return (lookup if few else masked_attention)(queries, keys, values, positions, window)

    return chosen


def _own_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """Which of the positions each sees: bool [T, T], or None for all up to itself."""
    return None if window is None else _causal_mask(positions, positions, window)


def _causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions [S] each query position [T] sees: bool [T, S]."""
    distance = queries.unsqueeze(-1) - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
