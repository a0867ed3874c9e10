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
    """The last part of a path, if it reads as a name."""
    name = Path(path).absolute().name
    return name if _PLAIN.fullmatch(name) else None


def model_name(source: Checkpoint, base: str | None = None) -> str:
    """The name of a model; if none is known, that of its folder or file, or its architecture.
    `base` is as in `known_name`.
    """
    path = source.path.with_suffix("") if source.path.suffix == GGUF else source.path
    return known_name(source, base) or file_name(path) or source.config.architecture


def known_name(source: Checkpoint, base: str | None = None) -> str | None:
    """The name of a model in its model card or GGUF's metadata, on a hub, without the owner, or in
    its config.

    Args:
        base: its name on a hub, if it was requested.
    """
    found = base or read_model_name(source.path) or base_model(source) or config_name(source.path)
    return None if found is None else found.rpartition("/")[2]


def base_model(source: Checkpoint) -> str | None:
    """The source's name on a hub, ``owner/name``, if its config, its place in the hub's cache, or
    its manifest shows one.
    """
    hub = origin(source.path)
    return recorded_base(source.path) if hub is None else _owned_name(source.path) or hub["name"]


def recorded_base(model: Path) -> str | None:
    """The name of a model's source on a hub, ``owner/name``, if its config or its manifest
    states one.
    """
    made = manifest_or_empty(model).get("source")
    hub = made.get("hub") if isinstance(made, dict) else None
    name = hub.get("name") if isinstance(hub, dict) else None
    return _owned_name(model) or (
        name if isinstance(name, str) and HUB_NAME.fullmatch(name) else None
    )


def _owned_name(model: Path) -> str | None:
    named = config_name(model)
    return named if named is not None and "/" in named else None


def config_name(model: Path) -> str | None:
    """The name in a model's config.json, with or without the owner; None if there is none, or a
    path.
    """
    config = model / "config.json"
    named = read_json(config).get("_name_or_path") if config.is_file() else None
    return named if isinstance(named, str) and HUB_NAME.fullmatch(named) else None


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
    parts = [f"all of layer{_numbers(whole)}"] if whole else []
    return "; ".join([*parts, *(", ".join(names) + where for where, names in names_in.items())])


def _merge_experts(names: Sequence[str], every: Iterable[str]) -> list[str]:
    """The names in a layer; a linear that all experts have is one name."""

    def numberless(name: str) -> str:
        return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)

    counts, all_counts = Counter(map(numberless, names)), Counter(map(numberless, every))
    merged = (
        numberless(one) if counts[numberless(one)] == all_counts[numberless(one)] else one
        for one in names
    )
    return list(dict.fromkeys(merged))


def _by_layer(modules: Iterable[str]) -> dict[str, list[str]]:
    """The names of modules in each layer, by its number; "" for those outside the layers."""
    names: dict[str, list[str]] = {}
    for module in modules:
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        names.setdefault(found[1] if found else "", []).append(found[2] if found else module)
    return names


def _numbers(layers: Sequence[str]) -> str:
    if len(layers) > _MAX_LISTED_LAYERS:
        return f"s {layers[0]} to {layers[-1]} ({len(layers)} of them)"
    return f"s {', '.join(layers[:-1])} and {layers[-1]}" if layers[1:] else f" {layers[0]}"
