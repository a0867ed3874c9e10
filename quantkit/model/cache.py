"""The static key/value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig

_MAX_CODE = 127
_SCALE_BYTES = 4


class KVCache:
    """Keys and values of every layer, allocated once at their final size.

    ``keys[layer]`` and ``values[layer]`` are [slots, KV heads, S, head_dim]: each sequence has a slot, and S is the
    number of positions that one can hold. In int8 each row of head_dim codes is followed by its scale, a
    float32 of four more bytes.
    """

    def __init__(
        self, config: ModelConfig, slots: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (slots, config.num_kv_heads, length, _width(config, dtype))
        self.length = length
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def update(
        self, layer: int, positions: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, KV heads, T, head_dim]; the whole layer's, as stored.

        Args:
            positions: where, [T] or [B, T].
            slots: whose, [B]; None is all slots in order.
        """
        for stored, new in ((self.keys[layer], keys), (self.values[layer], values)):
            rows = _stored(new, stored.dtype)
            if slots is None and positions.dim() == 1:
                stored.index_copy_(2, positions, rows)
            else:
                batch = torch.arange(len(rows), device=rows.device) if slots is None else slots
                stored[batch.unsqueeze(1), :, positions] = rows.transpose(1, 2)
        return self.keys[layer], self.values[layer]


def cache_bytes(config: ModelConfig, slots: int, length: int, dtype: torch.dtype) -> int:
    """What a cache takes."""
    return 2 * config.num_layers * slots * config.num_kv_heads * length * _width(config, dtype) * dtype.itemsize


def _width(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.head_dim + (_SCALE_BYTES if dtype == torch.int8 else 0)


def stored_floats(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., head_dim] as a cache of a type gives them back."""
    return cached_floats(_stored(rows, dtype), rows.dtype)


def cached_floats(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache as floats: [..., head_dim]."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scales = stored[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-_SCALE_BYTES].float() * scales).to(dtype)


def _stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return _int8_rows(rows) if dtype == torch.int8 else rows.to(dtype)


def _int8_rows(rows: Tensor) -> Tensor:
    """Rows [..., head_dim] as int8 codes, each row followed by its scale: the largest absolute value over 127.

    A row with a value that is not finite has a scale of NaN.
    """
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / _MAX_CODE
    codes = (wide / torch.where(scales > 0, scales, 1)).round().to(torch.int8)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return torch.cat([codes, scales.view(torch.int8)], dim=-1)
