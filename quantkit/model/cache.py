"""The static key/value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.config import ModelConfig


class KVCache:
    """Keys and values of every layer, allocated once at their final size.

    ``keys[layer]`` and ``values[layer]`` are [B, KV heads, S, head_dim]; S is the
    number of positions it can hold.
    """

    def __init__(
        self, config: ModelConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (batch, config.num_kv_heads, length, config.head_dim)
        self.length = length
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def update(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, KV heads, T, head_dim] at positions [T]; the whole layer's."""
        self.keys[layer].index_copy_(2, positions, keys.to(self.keys[layer].dtype))
        self.values[layer].index_copy_(2, positions, values.to(self.values[layer].dtype))
        return self.keys[layer], self.values[layer]
