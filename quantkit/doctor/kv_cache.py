"""Rules about a quantized key/value cache: its scheme in the config, and the scales of each layer."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.folder import CONFIG
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError
from quantkit.formats.containers.hf_settings import SETTINGS
from quantkit.formats.kv_cache import (
    TYPES,
    CacheTensor,
    cache_tensors,
    layers_without_scales,
    misfit,
    needs_zero_points,
    scheme_text,
    stated_scheme,
    without_zero_points,
)
from quantkit.json_values import Settings

_MAX_BYTES = 1 << 20


def check(view: View) -> Iterator[Finding]:
    """Check the scheme and the scales of the cache; the scales, a few bytes each, are read."""
    folder = view.folder
    tensors = cache_tensors(view.stored)
    scales = {name: entry for name, entry in tensors.items() if entry.kind == "scale" and {*entry.parts} & {"k", "v"}}
    stated = None if folder.settings is None else Settings(folder.settings, folder.root / CONFIG, SETTINGS)
    try:
        scheme = stated_scheme(stated)
    except CheckpointError as error:
        yield finding("bad-settings", CONFIG, f"{error.problem}: found {error.found}, expected {error.expected}")
        return
    if scales and scheme is None:
        yield finding("kv-no-scheme", CONFIG, f"{len(scales)} scales: {next(iter(scales))}")
    if folder.complete and scheme is not None and not scales and not scheme.get("dynamic"):
        yield finding("kv-no-scales", CONFIG, scheme_text(scheme))
    highest = max((entry.layer for entry in tensors.values()), default=0)
    layers = highest + 1 if view.config is None else view.config.num_layers
    if folder.complete and scales:
        for layer in layers_without_scales(scales, layers):
            found = ", ".join(name for name, entry in scales.items() if entry.layer == layer) or "none"
            yield finding("kv-scales-missing", f"layer {layer}", f"found {found}, expected scales of keys and values")
    if folder.complete and needs_zero_points(scheme):
        for layer, part in without_zero_points(tensors, layers):
            yield finding("kv-no-zero-points", f"layer {layer}", f"found none of its {part}")
    heads = (0, 0) if view.config is None else (view.config.num_heads, view.config.num_kv_heads)
    for name, entry in tensors.items():
        if (count := misfit(entry, view.stored[name], scheme, *heads)) is not None:
            yield finding("kv-scale-shape", name, f"found {list(view.stored[name].shape)}, expected {count} elements")
        yield from _value(view, name, entry)


def _value(view: View, name: str, entry: CacheTensor) -> Iterator[Finding]:
    tensor, is_scale = view.stored[name], entry.kind == "scale"
    if tensor.dtype not in TYPES[entry.kind] or not 0 < tensor.nbytes <= _MAX_BYTES:
        expected = "floats" if is_scale else "numbers"
        yield finding("kv-scale-value", name, f"found {tensor.dtype} {list(tensor.shape)}, expected {expected}")
        return
    try:
        value = view.folder.homes[name].read(name).double()
    except CheckpointError:
        return  # reported by rules about files
    if not value.isfinite().all() or (is_scale and not (value > 0).all()):
        yield finding("kv-scale-value", name, f"found {value.min().item():g}")
