"""The static key/value cache."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.tensors.cached_rows import CachedRows, to_cached_rows

_LAZY_BYTES = 1 << 20
"""Smaller tensors are not worth a mapping."""


class KVCache:
    """Keys and values of every layer, allocated once at their final size.

    ``keys[layer]`` and ``values[layer]`` are rows [slots, KV heads, S, head_dim]: each sequence has
    a slot, and S is the number of positions that one can hold. In int8 each row has a scale, in a
    separate tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.length = length
        self.keys, self.values = (
            [
                _zeros((slots, config.num_kv_heads, length), config.head_dim, dtype, device)
                for _ in config.layers
            ]
            for _ in range(2)
        )

    def tensors(self) -> list[Tensor]:
        """Return all that it consists of; slots are the first dimension of each, positions the
        third.
        """
        tensors: list[Tensor] = []
        for rows in (*self.keys, *self.values):
            for tensor in rows.tensors():
                tensors.append(tensor)
        return tensors

    def update(
        self,
        layer: int,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor | None = None,
    ) -> tuple[CachedRows, CachedRows]:
        """Store keys and values [B, KV heads, T, head_dim] at positions [T] or [B, T] of slots [B],
        None for all slots in order; returns the whole layer's, as stored.
        """
        for stored, floats in ((self.keys[layer], keys), (self.values[layer], values)):
            new = to_cached_rows(floats, stored.rows.dtype)
            for into, rows in zip(stored.tensors(), new.tensors(), strict=True):
                if slots is None and positions.dim() == 1:
                    into.index_copy_(2, positions, rows)
                else:
                    if slots is None:
                        batch = torch.arange(len(rows), device=rows.device)
                    else:
                        batch = slots
                    into[batch.unsqueeze(1), :, positions] = rows.transpose(1, 2)
        return self.keys[layer], self.values[layer]


def cache_bytes(config: ModelConfig, slots: int, length: int, dtype: torch.dtype) -> int:
    """Return what a cache takes."""
    row = config.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == torch.int8 else 0)
    return 2 * config.num_layers * slots * config.num_kv_heads * length * row


def _zeros(
    shape: tuple[int, int, int], head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> CachedRows:
    rows = zeros((*shape, head_dim), dtype, device)
    return CachedRows(rows, zeros(shape, torch.float32, device) if dtype == torch.int8 else None)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros of a shape; on a CPU a page of them takes memory only once it is written."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _LAZY_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
