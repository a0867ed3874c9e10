"""Names for people: of models, of files, and of groups of layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from quantkit.base.json_values import read_json
from quantkit.files.gguf_types import GGUF_SUFFIX
from quantkit.files.hub_names import read_origin
from quantkit.formats.authorship import HUB_NAME, read_model_name
from quantkit.formats.checkpoint import Checkpoint
from quantkit.quality.figures import manifest_or_empty

_PLAIN = re.compile(r"\w[\w.+-]*", re.ASCII)
_MAX_LISTED_LAYERS = 8


def file_name(path: str | Path) -> str | None:
    """Find the last part of a path, if it reads as a name."""
    name = Path(path).absolute().name
    if _PLAIN.fullmatch(name):
        return name
    return None


def model_name(source: Checkpoint, base: str | None = None) -> str:
    """Find the name of a model; if none is known, that of its folder or file, or its architecture.
    `base` is as in `find_model_name`.
    """
    if source.path.suffix == GGUF_SUFFIX:
        path = source.path.with_suffix("")
    else:
        path = source.path
    return find_model_name(source, base) or file_name(path) or source.config.architecture


def find_model_name(source: Checkpoint, base: str | None = None) -> str | None:
    """Find the name of a model in its model card or GGUF's metadata, on a hub, without the owner,
    or in its config.

    Args:
        base: its name on a hub, if it was requested.
    """
    # In order of trust. A config keeps the name of the model that it was copied from.
    full_name = (
        base
        or read_model_name(source.path)
        or find_base_model(source)
        or read_config_name(source.path)
    )
    if full_name is None:
        return None
    return full_name.rpartition("/")[2]


def find_base_model(source: Checkpoint) -> str | None:
    """Find the source's name on a hub, ``owner/name``, if its config, its place in the hub's
    cache, or its manifest shows one.
    """
    hub = read_origin(source.path)
    # Outside of the hub's cache.
    if hub is None:
        return read_base_model(source.path)
    return _read_qualified_name(source.path) or hub["name"]


def read_base_model(model: Path) -> str | None:
    """Read the name of a model's source on a hub, ``owner/name``, if its config or its manifest
    states one.
    """
    qualified_name = _read_qualified_name(model)
    if qualified_name is not None:
        return qualified_name
    # The manifest is not checked here, so each part may have any type.
    source = manifest_or_empty(model).get("source")
    if not isinstance(source, dict):
        return None
    hub = source.get("hub")
    if not isinstance(hub, dict):
        return None
    name = hub.get("name")
    if isinstance(name, str) and HUB_NAME.fullmatch(name):
        return name
    return None


def _read_qualified_name(model: Path) -> str | None:
    config_name = read_config_name(model)
    if config_name is not None and "/" in config_name:
        return config_name
    return None


def read_config_name(model: Path) -> str | None:
    """Read the name in a model's config.json, with or without the owner; None if there is none, or
    a path.
    """
    config = model / "config.json"
    if not config.is_file():
        return None
    # transformers writes what it loaded the model from: a name on the hub, or a local path.
    name = read_json(config).get("_name_or_path")
    if isinstance(name, str) and HUB_NAME.fullmatch(name):
        return name
    return None


def layer_names(modules: Iterable[str], every: Iterable[str]) -> str:
    """Name modules in few words: whole layers by number, others by name with the layers that
    contain them.

    Args:
        every: all modules of the model.
    """
    every_in_layers = _by_layer(every)
    complete_layers: list[str] = []
    layers_of: dict[str, list[str]] = {}
    for layer, layer_modules in _by_layer(modules).items():
        every_in_layer = every_in_layers[layer]
        names = _merge_experts(layer_modules, every_in_layer)
        # The empty layer has what is outside of layers, such as the head.
        if layer and names == _merge_experts(every_in_layer, every_in_layer):
            complete_layers.append(layer)
            continue
        for name in names:
            layers_of.setdefault(name, []).append(layer)
    # Names that occur in the same layers share a part of the text.
    names_by_place: dict[str, list[str]] = {}
    for name, layers in layers_of.items():
        place = f" of layer{_numbers(layers)}" if layers[0] else ""
        names_by_place.setdefault(place, []).append(f"`{name}`")
    parts: list[str] = []
    if complete_layers:
        parts.append(f"all of layer{_numbers(complete_layers)}")
    for place, names in names_by_place.items():
        parts.append(", ".join(names) + place)
    return "; ".join(parts)


def _merge_experts(names: Sequence[str], every: Iterable[str]) -> list[str]:
    """Shorten the names in a layer: a linear that all experts have is one name."""

    def numberless(name: str) -> str:
        return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)

    counts = Counter(map(numberless, names))
    all_counts = Counter(map(numberless, every))
    # A dict keeps the order and drops repetitions.
    merged: dict[str, None] = {}
    for name in names:
        short_name = numberless(name)
        is_complete = counts[short_name] == all_counts[short_name]
        merged[short_name if is_complete else name] = None
    return list(merged)


def _by_layer(modules: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of modules by the number of their layer; "" for those outside the layers."""
    names: dict[str, list[str]] = {}
    for module in modules:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        if match:
            names.setdefault(match[1], []).append(match[2])
        else:
            names.setdefault("", []).append(module)
    return names


def _numbers(layers: Sequence[str]) -> str:
    if len(layers) > _MAX_LISTED_LAYERS:
        return f"s {layers[0]} to {layers[-1]} ({len(layers)} of them)"
    if layers[1:]:
        return f"s {', '.join(layers[:-1])} and {layers[-1]}"
    return f" {layers[0]}"
