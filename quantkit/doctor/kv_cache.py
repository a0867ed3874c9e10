"""Rules about a quantized key/value cache: its scheme in the config, and the scales of each layer."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.doctor.findings import Finding, Rule
from quantkit.doctor.folder import CONFIG
from quantkit.doctor.quantization import BAD_SETTINGS
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError
from quantkit.formats.codecs.compressed_tensors import KV_CACHE_SCHEME
from quantkit.formats.kv_cache import cache_tensor, layers_without_scales, scheme_text, stated_scheme
from quantkit.tensors.dtypes import FLOATS

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
    "kv-scale-value", "error", "a scale of the KV cache is NaN, infinite, zero or negative", _AGAIN, _SOURCE
)

RULES = (SCALES_MISSING, NO_SCALES, NO_SCHEME, SCALE_VALUE)

_MOST_BYTES = 1 << 20


def check(view: View) -> Iterator[Finding]:
    """What is wrong with the scheme and scales of the cache; the scales, a few bytes each, are read."""
    folder = view.folder
    scales = {name: told for name in view.stored if (told := cache_tensor(name)) is not None and told.parts}
    try:
        scheme = stated_scheme(folder.settings)
    except ValueError as error:
        yield Finding(BAD_SETTINGS, CONFIG, f"{KV_CACHE_SCHEME} is {error}")
        return
    if scales and scheme is None:
        yield Finding(NO_SCHEME, CONFIG, f"{len(scales)} scales: {next(iter(scales))}")
    if folder.complete and scheme is not None and not scales and not scheme.get("dynamic"):
        yield Finding(NO_SCALES, CONFIG, scheme_text(scheme))
    if folder.complete and scales:
        layers = max(told.layer for told in scales.values()) + 1 if view.config is None else view.config.num_layers
        for layer in layers_without_scales(scales, layers):
            found = ", ".join(name for name, told in scales.items() if told.layer == layer) or "none"
            yield Finding(SCALES_MISSING, f"layer {layer}", f"found {found}, expected scales of keys and values")
    for name in scales:
        yield from _value(view, name)


def _value(view: View, name: str) -> Iterator[Finding]:
    tensor = view.stored[name]
    if tensor.dtype not in FLOATS or not 0 < tensor.nbytes <= _MOST_BYTES:
        yield Finding(SCALE_VALUE, name, f"found {tensor.dtype} {list(tensor.shape)}, expected floats")
        return
    try:
        value = view.folder.homes[name].read(name).float()
    except CheckpointError:
        return  # rules about files tell of it
    if not (value.isfinite() & (value > 0)).all():
        yield Finding(SCALE_VALUE, name, f"found {value.min().item():g}")
