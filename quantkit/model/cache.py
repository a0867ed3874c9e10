"""The static cache: keys and values of attention layers, states of others."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.model.run_memory import count_cache_bytes_per_token, count_state_bytes
from quantkit.tensors.cached_rows import CachedRows, to_cached_rows
from quantkit.tensors.dtypes import DType

_LAZY_BYTES = 1 << 20
"""Tensors below this size are allocated normally, because a mapping costs more than it saves."""


class KeysAndValues:
    """The keys and values of an attention layer: rows [slots, KV heads, S, head_dim]. In int8 each
    row has a scale, in a separate tensor.
    """

    def __init__(self, keys: CachedRows, values: CachedRows) -> None:
        self.keys = keys
        self.values = values

    def tensors(self) -> list[Tensor]:
        """List the tensors; in each, slots are the first dimension and positions the third."""
        return [*self.keys.tensors(), *self.values.tensors()]

    def update(
        self, positions: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None = None
    ) -> None:
        """Store keys and values, see `KVCache.update`."""
        for stored, floats in ((self.keys, keys), (self.values, values)):
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

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another."""
        for tensor in self.tensors():
            tensor[target, :, :length] = tensor[source, :, :length]


class LayerStates:
    """The states of a layer without keys and values: float32 [slots, ...] each.

    Unlike keys and values, they are those after the last token of a sequence only. They are
    float32 in any cache, because errors of a recurrence add up.
    """

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._states = list(states)

    def tensors(self) -> list[Tensor]:
        """List the tensors; in each, slots are the first dimension."""
        return self._states

    def read(self, slots: Tensor | None, is_first: Tensor) -> tuple[Tensor, ...]:
        """Read the states of slots [B], None for all in order; zeros where `is_first`, bool [B] or
        [].
        """
        states: list[Tensor] = []
        for stored in self._states:
            state = stored if slots is None else stored[slots]
            # A number of dimensions that broadcasts over each sequence's state.
            zeroed = is_first.view(-1, *[1] * (state.dim() - 1))
            states.append(state.masked_fill(zeroed, 0))
        return tuple(states)

    def write(self, slots: Tensor | None, states: Sequence[Tensor]) -> None:
        """Replace the states of slots [B], None for all in order."""
        for stored, state in zip(self._states, states, strict=True):
            if slots is None:
                stored.copy_(state)
            else:
                stored[slots] = state


LayerCache = KeysAndValues | LayerStates


class KVCache:
    """What each layer keeps of every sequence, allocated once at its final size: keys and values in
    layers with attention, states in others.

    Each sequence has a slot; `length` is the number of positions that one can hold.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate the cache; `dtype` is that of keys and values."""
        self.length = length
        self.layers: list[LayerCache] = []
        # Those that layers do not share with an earlier one.
        self._own_layers: list[LayerCache] = []
        self._sources = config.kv_sources
        for layer, source in enumerate(self._sources):
            if source is not None:
                self.layers.append(self.layers[source])
                continue
            states: list[Tensor] = []
            for state_shape in config.state_shapes(layer):
                states.append(zeros((slots, *state_shape), torch.float32, device))
            # A layer without a mixer has no states either.
            if config.layers[layer].mixer != "attention":
                self.layers.append(LayerStates(states))
            else:
                shape = slots, config.kv_heads_of(layer), length
                keys = _zeros(shape, config.head_dim_of(layer), dtype, device)
                values = _zeros(shape, config.head_dim_of(layer), dtype, device)
                self.layers.append(KeysAndValues(keys, values))
            self._own_layers.append(self.layers[-1])

    def tensors(self) -> list[Tensor]:
        """List all tensors of the cache; in each, slots are the first dimension."""
        tensors: list[Tensor] = []
        for layer in self._own_layers:
            tensors += layer.tensors()
        return tensors

    def rows(self, layer: int) -> KeysAndValues:
        """Return the keys and values of an attention layer."""
        cached = self.layers[layer]
        assert isinstance(cached, KeysAndValues)
        return cached

    def states(self, layer: int) -> LayerStates:
        """Return the states of a layer that has no attention."""
        cached = self.layers[layer]
        assert isinstance(cached, LayerStates)
        return cached

    def update(
        self,
        layer: int,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor | None = None,
    ) -> tuple[CachedRows, CachedRows]:
        """Store keys and values [B, KV heads, T, head_dim] at positions [T] or [B, T] of slots [B],
        None for all slots in order; returns all cached rows of the layer. Those of a layer that it
        shares with an earlier one are stored already.
        """
        cached = self.rows(layer)
        if self._sources[layer] is None:
            cached.update(positions, keys, values, slots)
        return cached.keys, cached.values

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of the first positions of a slot to another; states are left as
        they are.
        """
        for layer in self._own_layers:
            if isinstance(layer, KeysAndValues):
                layer.copy_prefix(source, target, length)

    def slot_states(self, slot: int) -> list[Tensor]:
        """List the states of a slot, of all layers that have some: views that change with it."""
        states: list[Tensor] = []
        for layer in self._own_layers:
            if isinstance(layer, LayerStates):
                states += [tensor[slot] for tensor in layer.tensors()]
        return states


def cache_bytes(config: ModelConfig, slots: int, length: int, dtype: torch.dtype) -> int:
    """Compute the size of a cache."""
    per_token = count_cache_bytes_per_token(config, DType(DType.of(dtype)))
    return slots * (length * per_token + count_state_bytes(config))


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
