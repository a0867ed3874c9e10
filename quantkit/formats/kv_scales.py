"""The quantized key/value cache that is run, calibrated and written: float8_e4m3fn, with one static
scale for the keys of a layer and one for its values.

The cache holds ``k / k_scale`` and ``v / v_scale``, rounded, of keys after rotary positions.
Without a scale, a layer has 1. Other schemes are read and carried, see `kv_cache`, but not run.
Source: vLLM's `BaseKVCacheMethod` and `validate_kv_cache_scheme`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import BLOCK
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.kv_cache import KvCache, cache_tensors, why_not_run

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


def scale_names(layer: int) -> tuple[str, str]:
    """Name the tensors with the scales of a layer's keys and values."""
    prefix = f"{BLOCK.format(layer=layer)}self_attn."
    return f"{prefix}k_scale", f"{prefix}v_scale"


def build_fp8_cache(config: ModelConfig, path: Path) -> KvCache:
    """Describe a cache with the scheme that is written, for a folder at a path."""
    # Without tensors: the folder's own tensors include the scales.
    return KvCache(
        path=path,
        scheme=FP8,
        tensors={},
        layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
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
    if cache is None or why_not_run(cache.scheme) is not None:
        return None
    # NaN is allowed, so that a damaged model can still be read.
    cache.require_sound(allow_nonfinite=True)
    values = cache.values()

    def scale(layer: int, part: str) -> float:
        value = values.get((layer, part, "scale"))
        if value is None:
            return NO_SCALE
        return value.item()

    return [(scale(layer, "k"), scale(layer, "v")) for layer in range(cache.layers)]
