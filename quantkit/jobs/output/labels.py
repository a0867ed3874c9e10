"""Names for people: of models, of files, and of groups of layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from quantkit.base.json_values import read_json
from quantkit.files.gguf_types import GGUF
from quantkit.files.hub import origin
from quantkit.formats.authorship import HUB_NAME, read_model_name
from quantkit.formats.checkpoint import Checkpoint
from quantkit.quality.figures import manifest_or_empty

_PLAIN = re.compile(r"\w[\w.+-]*", re.ASCII)
_MAX_LISTED_LAYERS = 8


def file_name(path: str | Path) -> str | None:
    """Return the last part of a path, if it reads as a name."""
    name = Path(path).absolute().name
    if _PLAIN.fullmatch(name):
        return name
    return None


def model_name(source: Checkpoint, base: str | None = None) -> str:
    """Return the name of a model; if none is known, that of its folder or file, or its
    architecture. `base` is as in `find_model_name`.
    """
    if source.path.suffix == GGUF:
        path = source.path.with_suffix("")
    else:
        path = source.path
    return find_model_name(source, base) or file_name(path) or source.config.architecture


def find_model_name(source: Checkpoint, base: str | None = None) -> str | None:
    """Return the name of a model in its model card or GGUF's metadata, on a hub, without the owner,
    or in its config.

    Args:
        base: its name on a hub, if it was requested.
    """
    found = (
        base
        or read_model_name(source.path)
        or find_base_model(source)
        or read_config_name(source.path)
    )
    if found is None:
        return None
    return found.rpartition("/")[2]


def find_base_model(source: Checkpoint) -> str | None:
    """Return the source's name on a hub, ``owner/name``, if its config, its place in the hub's
    cache, or its manifest shows one.
    """
    hub = origin(source.path)
    if hub is None:
        return read_base_model(source.path)
    return _read_qualified_name(source.path) or hub["name"]


def read_base_model(model: Path) -> str | None:
    """Return the name of a model's source on a hub, ``owner/name``, if its config or its manifest
    states one.
    """
    made = manifest_or_empty(model).get("source")
    if isinstance(made, dict):
        hub = made.get("hub")
    else:
        hub = None
    if isinstance(hub, dict):
        name = hub.get("name")
    else:
        name = None
    return _read_qualified_name(model) or (
        name if isinstance(name, str) and HUB_NAME.fullmatch(name) else None
    )


def _read_qualified_name(model: Path) -> str | None:
    config_name = read_config_name(model)
    if config_name is not None and "/" in config_name:
        return config_name
    return None


def read_config_name(model: Path) -> str | None:
    """Return the name in a model's config.json, with or without the owner; None if there is none,
    or a path.
    """
    config = model / "config.json"
    if config.is_file():
        named = read_json(config).get("_name_or_path")
    else:
        named = None
    if isinstance(named, str) and HUB_NAME.fullmatch(named):
        return named
    return None


def layer_names(modules: Iterable[str], every: Iterable[str]) -> str:
    """Modules in few words: whole layers by number, others by name with the layers that contain
    them.

    Args:
        every: all modules of the model.
    """
    every_in_layers = _by_layer(every)
    in_layers = {
        layer: _merge_experts(names, every_in_layers[layer])
        for layer, names in _by_layer(modules).items()
    }
    whole = [
        layer
        for layer, names in in_layers.items()
        if layer and names == _merge_experts(every_in_layers[layer], every_in_layers[layer])
    ]
    layers_of: dict[str, list[str]] = {}
    for layer, names in in_layers.items():
        for name in names if layer not in whole else ():
            layers_of.setdefault(name, []).append(layer)
    names_in: dict[str, list[str]] = {}
    for name, layers in layers_of.items():
        names_in.setdefault(f" of layer{_numbers(layers)}" if layers[0] else "", []).append(
            f"`{name}`"
        )
    if whole:
        parts = [f"all of layer{_numbers(whole)}"]
    else:
        parts = []
    return "; ".join([*parts, *(", ".join(names) + where for where, names in names_in.items())])


def _merge_experts(names: Sequence[str], every: Iterable[str]) -> list[str]:
    """Return the names in a layer; a linear that all experts have is one name."""

    def numberless(name: str) -> str:
        return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)

    counts = Counter(map(numberless, names))
    all_counts = Counter(map(numberless, every))
    merged = (
        numberless(name) if counts[numberless(name)] == all_counts[numberless(name)] else name
        for name in names
    )
    return list(dict.fromkeys(merged))


def _by_layer(modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of modules in each layer, by its number; "" for those outside the layers."""
    names: dict[str, list[str]] = {}
    for module in modules:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        names.setdefault(match[1] if match else "", []).append(match[2] if match else module)
    return names


def _numbers(layers: Sequence[str]) -> str:
    if len(layers) > _MAX_LISTED_LAYERS:
        return f"s {layers[0]} to {layers[-1]} ({len(layers)} of them)"
    if layers[1:]:
        return f"s {', '.join(layers[:-1])} and {layers[-1]}"
    return f" {layers[0]}"
