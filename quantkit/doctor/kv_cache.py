"""Rules about a quantized key/value cache: its scheme in the config, and the scales of each layer."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.doctor.findings import Finding, Rule
from quantkit.doctor.folder import CONFIG
from quantkit.doctor.quantization import BAD_SETTINGS
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError
from quantkit.formats.codecs.compressed_tensors import KV_CACHE_SCHEME
from quantkit.formats.containers.hf_settings import SETTINGS
from quantkit.formats.kv_cache import (
    TYPES,
    CacheTensor,
    cache_tensor,
    layers_without_scales,
    misfit,
    without_zero_points,
)
from quantkit.formats.kv_cache_scheme import needs_zero_points, scheme_text, stated_scheme
from quantkit.json_values import Settings

_AGAIN = "quantize the cache again, or take its scales and kv_cache_scheme out of the folder"
_SOURCE = "vLLM's BaseKVCacheMethod"

SCALES_MISSING = Rule(
    "kv-scales-missing", "error", "some layers lack a scale of the KV cache: vLLM takes 1 for it", _AGAIN, _SOURCE
)
NO_SCALES = Rule(
    "kv-no-scales", "warning", "the config quantizes the KV cache, and there are no scales: vLLM takes 1 for each",
    _AGAIN, _SOURCE,
)  # fmt: skip
NO_SCHEME = Rule(
    "kv-no-scheme", "warning", "there are scales of a KV cache, and the config has no kv_cache_scheme: they are unused",
    f"write {KV_CACHE_SCHEME} into quantization_config, or take the scales out", _SOURCE,
)  # fmt: skip
SCALE_VALUE = Rule(
    "kv-scale-value", "error",
    "a scale of the KV cache is NaN, infinite, zero or negative, or a zero point NaN or infinite", _AGAIN, _SOURCE,
)  # fmt: skip
SCALE_SHAPE = Rule(
    "kv-scale-shape", "error",
    "a scale or zero point of the KV cache has not one element for all, or for each head, as the scheme says", _AGAIN,
    "compressed-tensors' initialize_qparams",
)  # fmt: skip
NO_ZERO_POINTS = Rule(
    "kv-no-zero-points", "error", "the scheme of the KV cache is asymmetric, and zero points are missing", _AGAIN,
    "compressed-tensors' initialize_qparams",
)  # fmt: skip

RULES = (SCALES_MISSING, NO_SCALES, NO_SCHEME, SCALE_VALUE, SCALE_SHAPE, NO_ZERO_POINTS)

_MAX_BYTES = 1 << 20


def check(view: View) -> Iterator[Finding]:
    """What is wrong with the scheme and scales of the cache; the scales, a few bytes each, are read."""
    folder = view.folder
    tensors = {name: entry for name in view.stored if (entry := cache_tensor(name)) is not None}
    scales = {name: entry for name, entry in tensors.items() if entry.kind == "scale" and {*entry.parts} & {"k", "v"}}
    stated = None if folder.settings is None else Settings(folder.settings, folder.root / CONFIG, SETTINGS)
    try:
        scheme = stated_scheme(stated)
    except CheckpointError as error:
        yield Finding(BAD_SETTINGS, CONFIG, f"{error.problem}: found {error.found}, expected {error.expected}")
        return
    if scales and scheme is None:
        yield Finding(NO_SCHEME, CONFIG, f"{len(scales)} scales: {next(iter(scales))}")
    if folder.complete and scheme is not None and not scales and not scheme.get("dynamic"):
        yield Finding(NO_SCALES, CONFIG, scheme_text(scheme))
    highest = max((entry.layer for entry in tensors.values()), default=0)
    layers = highest + 1 if view.config is None else view.config.num_layers
    if folder.complete and scales:
        for layer in layers_without_scales(scales, layers):
            found = ", ".join(name for name, entry in scales.items() if entry.layer == layer) or "none"
            yield Finding(SCALES_MISSING, f"layer {layer}", f"found {found}, expected scales of keys and values")
    if folder.complete and needs_zero_points(scheme):
        for layer, part in without_zero_points(tensors, layers):
            yield Finding(NO_ZERO_POINTS, f"layer {layer}", f"found none of its {part}")
    heads = (0, 0) if view.config is None else (view.config.num_heads, view.config.num_kv_heads)
    for name, entry in tensors.items():
        if (count := misfit(entry, view.stored[name], scheme, *heads)) is not None:
            yield Finding(SCALE_SHAPE, name, f"found {list(view.stored[name].shape)}, expected {count} elements")
        yield from _value(view, name, entry)


def _value(view: View, name: str, entry: CacheTensor) -> Iterator[Finding]:
    tensor, is_scale = view.stored[name], entry.kind == "scale"
    if tensor.dtype not in TYPES[entry.kind] or not 0 < tensor.nbytes <= _MAX_BYTES:
        expected = "floats" if is_scale else "numbers"
        yield Finding(SCALE_VALUE, name, f"found {tensor.dtype} {list(tensor.shape)}, expected {expected}")
        return
    try:
        value = view.folder.homes[name].read(name).double()
    except CheckpointError:
        return  # rules about files tell of it
    if not value.isfinite().all() or (is_scale and not (value > 0).all()):
        yield Finding(SCALE_VALUE, name, f"found {value.min().item():g}")
