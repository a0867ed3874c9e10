"""Rules about parts of a model other than its decoder: layers that predict further tokens (MTP),
and parts for images and sound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantkit.architectures.config import OpaqueTensor
from quantkit.architectures.families.opaque import (
    LINEARS,
    is_extra_layer,
    layer_beyond,
    possible_linears,
)
from quantkit.base.json_values import Settings
from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.side_files import CONFIG
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError
from quantkit.formats.codecs.compressed_tensors import CompressedTensors
from quantkit.formats.containers.hf_settings import SETTINGS

PREDICTION = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_num_layers",
)
"""The keys of config.json with the number of layers that predict further tokens."""
_TOWERS = {
    "vision_config": ("vis", "vit", "image", "patch"),
    "audio_config": ("audio", "speech", "sound"),
}
_FUSED = frozenset(
    {"qkv_proj", "gate_up_proj", "qkv", "query_key_value", "W_pack", "Wqkv", "in_proj"}
)
# Linears that join embeddings with hidden states: runtimes never quantize them in layers beyond
# the model's.
_JOINING = ("fc", "eh_proj")


def check(view: View) -> Iterator[Finding]:
    """Check layers that predict further tokens, and parts for images and sound."""
    # In an incomplete folder, missing tensors may be in the file that could not be read.
    if view.stored and view.folder.complete:
        yield from _check_dropped_prediction(view)
        yield from _check_dropped_towers(view)
        yield from _check_ignored_linears(view)
    for module, coded in view.coded.items():
        if coded.layout is not None and view.hints.is_tower(module):
            yield finding("quantized-tower", module, coded.title)


def _check_dropped_prediction(view: View) -> Iterator[Finding]:
    raw = view.folder.config
    stored = view.stored
    layers: set[int] = set()
    for name in stored:
        layer = layer_beyond(name, raw)
        if layer is not None:
            layers.add(layer)
    for key, count in _prediction_settings(raw):
        if type(count) is not int or count <= 0:
            continue
        if not any(is_extra_layer(name, raw) for name in stored):
            yield finding("dropped-prediction", CONFIG, f"{key} is {count}")
        elif layers and len(layers) < count:
            if len(layers) == 1:
                stored_layers = f"layer {min(layers)}"
            else:
                stored_layers = f"{len(layers)} such layers"
            yield finding(
                "dropped-prediction", CONFIG, f"{key} is {count}, and there is only {stored_layers}"
            )


def _prediction_settings(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # Configs of multimodal models have the decoder's settings in an object such as text_config.
    parts = [raw]
    for value in raw.values():
        if isinstance(value, dict):
            parts.append(value)
    for part in parts:
        for key in PREDICTION:
            yield key, part.get(key)


def _check_dropped_towers(view: View) -> Iterator[Finding]:
    for key, words in _TOWERS.items():
        if not isinstance(view.folder.config.get(key), dict):
            continue
        # Families name their towers differently, but all by what the tower reads.
        pattern = re.compile("|".join(words))
        if not any(pattern.search(name.lower()) for name in view.stored):
            yield finding("dropped-tower", CONFIG, f"{key}, and no tensor with such a name")


def _check_ignored_linears(view: View) -> Iterator[Finding]:
    """Find linears of layers that predict further tokens that are stored as floats, and that
    runtimes would build as quantized ones; and names in the config of such layers that no module
    has.
    """
    folder = view.folder
    method = view.method
    if method is None or folder.settings is None or view.claims.problems:
        return
    settings = Settings(folder.settings, folder.root / CONFIG, SETTINGS)
    linears = _float_linears(view)
    try:
        # Runtimes do not vary the names of these modules.
        if isinstance(method, CompressedTensors):
            claims = method.claims(settings, linears, view.coded, spelled=lambda module: [module])
            if settings.has("ignore"):
                ignored = settings.strings("ignore")
            else:
                ignored = []
        else:
            claims = method.claims(settings, linears, view.coded)
            ignored = []
    except CheckpointError:
        # Reported by rules about quantized weights.
        return
    lost = _lost_linears(view, ignored, linears)
    unknown_names: list[str] = []
    for name in _find_unknown_names(view, ignored, linears):
        if name not in lost:
            unknown_names.append(name)
    for name in lost:
        yield finding("dropped-prediction", name, "is in ignore, and in no file")
    # Settings that do not list their modules say nothing of a single linear.
    if claims.certain:
        for module in linears:
            claim = claims.modules.get(module)
            if claim is None:
                continue
            if claim.layout is None:
                title = "quantized"
            else:
                title = claim.layout.title
            # The settings may name this module with another prefix, which runtimes do not vary.
            similar_names = [name for name in unknown_names if _is_same(name, module)]
            if similar_names:
                hint = f", which names '{similar_names[0]}' instead,"
            else:
                hint = ""
            yield finding("mtp-not-ignored", module, f"floats, and by the config{hint} {title}")
    for name in unknown_names:
        yield finding("names-nothing", name, "is no module of the folder")


def _float_linears(view: View) -> list[str]:
    """List the linears that are stored as floats in layers that predict further tokens, as
    runtimes name them.
    """
    raw = view.folder.config
    result = []
    for name, tensor in view.stored.items():
        if not is_extra_layer(name, raw):
            continue
        if layer_beyond(name, raw) is not None:
            linear_names = LINEARS
        else:
            linear_names = LINEARS.union(_JOINING)
        for module in possible_linears(OpaqueTensor(name, tensor.shape, str(tensor.dtype))):
            if module.rpartition(".")[2] in linear_names:
                result.append(module)
    return result


def _find_unknown_names(view: View, names: Iterable[str], linears: Iterable[str]) -> list[str]:
    """Find the names in such layers that no module has."""
    raw = view.folder.config
    linear_names = set(linears)
    parents = set[str]()
    for stored in view.stored:
        if is_extra_layer(stored, raw):
            module = stored
        else:
            module = ""
        while module := module.rpartition(".")[0]:
            parents.add(module)
    unknown_names: list[str] = []
    for name in names:
        # In compressed-tensors, "re:" begins a regular expression.
        if name.startswith("re:") or not is_extra_layer(f"{name}.weight", raw):
            continue
        # A name next to a module may be that of a linear that a runtime makes by fusing others.
        if name not in linear_names and name.rpartition(".")[0] not in parents:
            unknown_names.append(name)
    return unknown_names


def _lost_linears(view: View, names: Iterable[str], linears: Iterable[str]) -> list[str]:
    """Find the names of linears in such layers that are in no file, although other linears of the
    same layers are.
    """
    raw = view.folder.config
    extra_modules = [name.rpartition(".")[0] for name in view.stored if is_extra_layer(name, raw)]
    stored_names = {*linears, *extra_modules, *view.coded, *view.stored}
    roots: set[str] = set()
    # Modules in which a fused linear is stored in place of those that a config may name.
    parents_of_fused: set[str] = set()
    for module in extra_modules:
        root = _find_layer_prefix(module, raw)
        if root:
            roots.add(root)
        parent, _, last = module.rpartition(".")
        if last in _FUSED:
            parents_of_fused.add(parent)
    single_linears = LINEARS.union(_JOINING) - _FUSED
    result = []
    for name in names:
        parent, _, last = name.rpartition(".")
        if name.startswith("re:") or last not in single_linears or parent in parents_of_fused:
            continue
        if name not in stored_names and _find_layer_prefix(name, raw) in roots:
            result.append(name)
    return result


def _find_layer_prefix(module: str, raw: Mapping[str, Any]) -> str:
    """Find the shortest prefix of a module's name that is in such a layer; empty if there is
    none.
    """
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count])
        if is_extra_layer(f"{prefix}.weight", raw):
            return prefix
    return ""


def _is_same(name: str, module: str) -> bool:
    """Return whether a name is that of a module, but for its beginning."""
    return name.endswith(f".{module}") or module.endswith(f".{name}")
