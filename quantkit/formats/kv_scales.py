"""The quantized key/value cache that is run, calibrated and written: float8_e4m3fn, with one static
scale for the keys of a layer and one for its values.

The cache holds ``k / k_scale`` and ``v / v_scale``, rounded, of keys after rotary positions.
Without a scale, a layer has 1. Other schemes are read and carried, see `kv_cache`, but not run.
Source: vLLM's `BaseKVCacheMethod` and `validate_kv_cache_scheme`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import BLOCK
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.kv_cache import KvCache, Place, cache_tensors, why_not_run
from quantkit.tensors.late import torch

KvCacheName = Literal["fp8"]
KV_CACHES = get_args(KvCacheName)

FP8: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
"""The scheme as the settings of compressed-tensors state it."""
NO_SCALE = 1.0
"""The scale where there is none, and that of keys or values which are all zero."""


def attention_name(layer: int) -> str:
    """Name the attention module of a layer in a family that quantkit's decoder runs."""
    return f"{BLOCK.format(layer=layer)}self_attn"


def scale_names(attention: str) -> tuple[str, str]:
    """Name the tensors with the scales of the keys and values of an attention module."""
    return f"{attention}.k_scale", f"{attention}.v_scale"


def build_fp8_cache(config: ModelConfig, path: Path, attention: tuple[str, ...]) -> KvCache:
    """Describe a cache with the scheme that is written, for a folder at a path, with scales for
    attention modules on disk.
    """
    # Without tensors: the folder's own tensors include the scales.
    return KvCache(
        path=path,
        scheme=FP8,
        tensors={},
        layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        attention=attention,
    )


def is_scale(name: str) -> bool:
    """Return whether a tensor is a scale of the cache, by its name."""
    return bool(cache_tensors([name]))


def layer_scales(checkpoint: Checkpoint) -> list[tuple[float, float]] | None:
    """Read the scales of the keys and values of each layer, which may be NaN; None if the
    checkpoint states no cache that is run.

    Raises:
        CheckpointError: see `KvCache.require_sound`.
    """
    cache = checkpoint.kv_cache
    values = _read_run_values(checkpoint)
    if cache is None or values is None:
        return None
    scales: list[tuple[float, float]] = []
    for layer in range(cache.layers):
        scales.append(_select_scales(values, layer))
    return scales


def attention_scales(
    checkpoint: Checkpoint, attention: Iterable[str]
) -> dict[str, tuple[float, float]] | None:
    """Read the scales of the keys and values of attention modules on disk, as `layer_scales` does
    those of layers.
    """
    values = _read_run_values(checkpoint)
    if values is None:
        return None
    scales: dict[str, tuple[float, float]] = {}
    for module in attention:
        # Tools name their scales in several ways, but all with the number of the layer.
        name = scale_names(module)[0]
        entry = cache_tensors([name]).get(name)
        if entry is None:
            scales[module] = (NO_SCALE, NO_SCALE)
        else:
            scales[module] = _select_scales(values, entry.layer)
    return scales


def _read_run_values(checkpoint: Checkpoint) -> dict[Place, torch.Tensor] | None:
    """Read the scales of a cache that is run, by place; None if the checkpoint has none."""
    cache = checkpoint.kv_cache
    if cache is None or why_not_run(cache.scheme) is not None:
        return None
    # NaN is allowed, so that a damaged model can still be read.
    cache.require_sound(allow_nonfinite=True)
    return cache.values()


def _select_scales(values: Mapping[Place, torch.Tensor], layer: int) -> tuple[float, float]:
    """Select the scales of a layer's keys and values."""
    scales: list[float] = []
    for part in ("k", "v"):
        value = values.get((layer, part, "scale"))
        if value is None:
            scales.append(NO_SCALE)
        else:
            scales.append(value.item())
    return scales[0], scales[1]
