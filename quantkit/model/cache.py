"""The static key/value cache."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.model.run_memory import count_cache_bytes_per_token
from quantkit.tensors.cached_rows import CachedRows, to_cached_rows
from quantkit.tensors.dtypes import DType

_LAZY_BYTES = 1 << 20
"""Tensors below this size are allocated normally, because a mapping costs more than it saves."""


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
        self.keys: list[CachedRows] = []
        self.values: list[CachedRows] = []
        shape = slots, config.num_kv_heads, length
        for _ in config.layers:
            self.keys.append(_zeros(shape, config.head_dim, dtype, device))
            self.values.append(_zeros(shape, config.head_dim, dtype, device))

    def tensors(self) -> list[Tensor]:
        """List all tensors of the cache; in each, slots are the first dimension and positions the
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
        None for all slots in order; returns all cached rows of the layer.
        """
        for stored, floats in ((self.keys[layer], keys), (self.values[layer], values)):
            new = to_cached_rows(floats, stored.rows.dtype)
            for target, rows in zip(stored.tensors(), new.tensors(), strict=True):
                if slots is None and positions.dim() == 1:
                    target.index_copy_(2, positions, rows)
                else:
                    if slots is None:
                        batch = torch.arange(len(rows), device=rows.device)
                    else:
                        batch = slots
                    # Index tensors on both sides of a slice move their dimensions to the front, so
                    # the target is [B, T, KV heads, ...].
                    target[batch.unsqueeze(1), :, positions] = rows.transpose(1, 2)
        return self.keys[layer], self.values[layer]


def cache_bytes(config: ModelConfig, slots: int, length: int, dtype: torch.dtype) -> int:
    """Compute the size of a cache."""
    return slots * length * count_cache_bytes_per_token(config, DType(DType.of(dtype)))


def _zeros(
    shape: tuple[int, int, int], head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> CachedRows:
    rows = zeros((*shape, head_dim), dtype, device)
    if dtype != torch.int8:
        return CachedRows(rows, None)
    return CachedRows(rows, zeros(shape, torch.float32, device))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Allocate zeros of a shape; on a CPU, a page of them uses memory only after it is written."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < _LAZY_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    # An anonymous mapping contains zeros, and the system adds a page at the first write.
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
