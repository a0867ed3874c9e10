"""What becomes of the scales of a quantized key/value cache, which quantkit itself does not use."""

from __future__ import annotations

from pathlib import Path

from quantkit.formats.codecs.compressed_tensors import CompressedTensors, Int8Activations
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.kv_cache import KvCache
from quantkit.formats.registry import HF, Target

_HAVE_A_PLACE = (CompressedTensors.name, Int8Activations.name, HF.name)


def kept_kv_cache(
    source: StoredCheckpoint, target: Target, dst: Path, *, dequantize: bool, allow_nonfinite: bool
) -> tuple[KvCache | None, list[str]]:  # fmt: skip
    """What a conversion writes again, as it is, of its source's quantized key/value cache, and notes for the user.

    Raises:
        NonFiniteError, CheckpointError: see `KvCache.require_sound`.
    """
    cache = source.kv_cache
    if cache is None or not cache.rewritable or dequantize or target.name not in _HAVE_A_PLACE:
        return None, dropped_kv_cache(source, dst)
    cache.require_sound(allow_nonfinite=allow_nonfinite)
    return cache, [f"{dst}: the scheme and scales of the KV cache are carried as they are"]


def dropped_kv_cache(source: StoredCheckpoint, dst: Path) -> list[str]:
    """A note where an output says nothing of the quantized key/value cache of its source."""
    if source.kv_cache is None:
        return []
    return [f"{dst}: the scheme and scales of the KV cache are dropped: readers keep the cache in floats"]
