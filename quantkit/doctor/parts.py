"""Rules about parts of a model other than its decoder: layers that predict further tokens (MTP),
and parts for images and sound.
"""

from __future__ import annotations

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
# Which runtimes never quantize in layers beyond the model's.
_JOINING = ("fc", "eh_proj")


def check(view: View) -> Iterator[Finding]:
    """Yield what is wrong with layers that predict further tokens, and with parts for images and
    sound.
    """
    if view.stored and view.folder.complete:
        yield from _check_dropped_prediction(view)
        yield from _check_dropped_towers(view)
        yield from _not_ignored(view)
    for module, coded in view.coded.items():
        if coded.layout is not None and view.hints.is_tower(module):
            yield finding("quantized-tower", module, coded.title)


def _check_dropped_prediction(view: View) -> Iterator[Finding]:
    raw = view.folder.config
    stored = view.stored
    layers = {layer for name in stored if (layer := layer_beyond(name, raw)) is not None}
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    for key, count in ((key, part.get(key)) for part in parts for key in PREDICTION):
        if type(count) is not int or count <= 0:
            continue
        if not any(is_extra_layer(name, raw) for name in stored):
            yield finding("dropped-prediction", CONFIG, f"{key} is {count}")
        elif layers and len(layers) < count:
            if len(layers) == 1:
                found = f"layer {min(layers)}"
            else:
                found = f"{len(layers)} such layers"
            yield finding(
                "dropped-prediction", CONFIG, f"{key} is {count}, and there is only {found}"
            )


def _check_dropped_towers(view: View) -> Iterator[Finding]:
    for key, words in _TOWERS.items():
        stated = isinstance(view.folder.config.get(key), dict)
        if stated and not any(word in name.lower() for name in view.stored for word in words):
            yield finding("dropped-tower", CONFIG, f"{key}, and no tensor with such a name")


def _not_ignored(view: View) -> Iterator[Finding]:
    """Linears of layers that predict further tokens that are stored as floats, and that runtimes
    would build as quantized ones; and names that the config gives such layers and no module has.
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
    unknown = [name for name in _find_unknown_names(view, ignored, linears) if name not in lost]
    for name in lost:
        yield finding("dropped-prediction", name, "is in ignore, and in no file")
    for module in linears if claims.certain else ():
        if (claim := claims.modules.get(module)) is not None:
            if claim.layout is None:
                title = "quantized"
            else:
                title = claim.layout.title
            other = next((name for name in unknown if _is_same(name, module)), None)
            if other is None:
                also = ""
            else:
                also = f", which names '{other}' instead,"
            yield finding("mtp-not-ignored", module, f"floats, and by the config{also} {title}")
    for name in unknown:
        yield finding("names-nothing", name, "is no module of the folder")


def _float_linears(view: View) -> list[str]:
    """Return the linears of layers that predict further tokens, as runtimes name them, that are
    stored as floats.
    """
    raw = view.folder.config
    result = []
    for name, tensor in view.stored.items():
        if is_extra_layer(name, raw):
            if layer_beyond(name, raw) is not None:
                known = LINEARS
            else:
                known = LINEARS.union(_JOINING)
            modules = possible_linears(OpaqueTensor(name, tensor.shape, str(tensor.dtype)))
            result += [module for module in modules if module.rpartition(".")[2] in known]
    return result


def _find_unknown_names(view: View, names: Iterable[str], linears: Iterable[str]) -> list[str]:
    """Return the names in such layers that are those of no module, nor of one next to a module:
    runtimes fuse some.
    """
    raw = view.folder.config
    known = set(linears)
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
        if (
            not name.startswith("re:")
            and is_extra_layer(f"{name}.weight", raw)
            and name not in known
            and name.rpartition(".")[0] not in parents
        ):
            unknown_names.append(name)
    return unknown_names


def _lost_linears(view: View, names: Iterable[str], linears: Iterable[str]) -> list[str]:
    """Return the names of linears in such layers that are in no file, although others of the same
    layers are.
    """
    raw = view.folder.config
    extra = [name.rpartition(".")[0] for name in view.stored if is_extra_layer(name, raw)]
    known = {*linears, *extra, *view.coded, *view.stored}
    roots = {root for module in extra if (root := _root(module, raw))}
    fused = set()
    for module in extra:
        if module.rpartition(".")[2] in _FUSED:
            fused.add(module.rpartition(".")[0])
    result = []
    for name in names:
        parent, _, last = name.rpartition(".")
        single = last in LINEARS.union(_JOINING) - _FUSED and parent not in fused
        if (
            not name.startswith("re:")
            and single
            and name not in known
            and _root(name, raw) in roots
        ):
            result.append(name)
    return result


def _root(module: str, raw: Mapping[str, Any]) -> str:
    """Return the first part of a module's name that says that it is in such a layer, with those
    before it.
    """
    parts = module.split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if is_extra_layer(f"{prefix}.weight", raw)), "")


def _is_same(name: str, module: str) -> bool:
    """Return whether a name is that of a module, but for its beginning."""
    return name.endswith(f".{module}") or module.endswith(f".{name}")
