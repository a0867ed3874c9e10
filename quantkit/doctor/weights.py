"""Rules about tensors against config.json: all that the model needs, in the right shapes and types, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quantkit.architectures.families import ignored_rope_settings
from quantkit.architectures.families.opaque import is_extra_layer
from quantkit.architectures.names import is_derived_buffer, is_embedding
from quantkit.doctor.findings import Finding, finding
from quantkit.doctor.folder import CONFIG
from quantkit.doctor.view import View
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.formats.codecs.awq import Awq
from quantkit.formats.codecs.gptq import Gptq
from quantkit.formats.codecs.table import METHODS
from quantkit.formats.containers.hf_settings import SETTINGS, read_codecs
from quantkit.formats.detect import open_checkpoint
from quantkit.json_values import shown
from quantkit.tensors.dtypes import FLOATS

_OF_ACTIVATIONS = re.compile(
    r"(.+)\.(input_scale|input_scale_ub|activation_scale|output_scale|input_zero_point|output_zero_point"
    r"|input_global_scale|[qkv]_scale|kv_scale|k_zero_point|v_zero_point)"
)
"""Tensors that belong to quantized activations or a quantized cache."""
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
_TOWERS = {"vision_config": ("vis", "vit", "image", "patch"), "audio_config": ("audio", "speech", "sound")}


def check(view: View) -> Iterator[Finding]:
    """What is wrong with the tensors of a folder."""
    kind = view.folder.config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        yield finding("bad-config", CONFIG, f"model_type is {shown(kind)}")
    base = view.folder.config.get("rope_theta")  # which readers use along with rope_parameters
    if base is not None and view.problem is None and (type(base) not in (int, float) or base <= 0):
        yield finding("bad-config", CONFIG, f"rope_theta is {shown(base)}")
    else:
        for ignored in ignored_rope_settings(view.folder.config):
            yield finding("rope-conflict", CONFIG, f"{ignored}, in transformers 5")
    if (error := view.problem) is not None:
        found = f"{error.problem}{f' (found {error.found})' if error.found is not None else ''}"
        rule = "unknown-setting" if isinstance(error, UnsupportedError) else "bad-config"
        rule, where = (rule, CONFIG) if view.config is None else ("two-forms", view.folder.path.name)
        yield finding(rule, where, found)
    if view.known:
        yield from _missing(view)
        yield from _extra(view)
        yield from _shapes(view)
    yield from _dropped(view)


def check_read(view: View, *, deep: bool) -> Iterator[Finding]:
    """Why quantkit refuses to open a folder in which nothing else was found. With `deep`, zero points and offsets, by
    which some formats are recognized, are read; otherwise only the settings are checked."""
    folder = view.folder
    try:
        if deep or folder.settings is None:
            open_checkpoint(folder.root)
        else:
            raw, modules = {SETTINGS: folder.settings}, dict.fromkeys([*view.linears, *view.coded])
            read_codecs(raw, modules, folder.root / CONFIG, METHODS, view.stored)
    except (CheckpointError, UnsupportedError) as error:
        yield finding("not-read-here", folder.path.name, str(error))


def _missing(view: View) -> Iterator[Finding]:
    for name, tensor in view.expected.items():
        coded = name.removesuffix(".weight") in view.coded  # complete or not, which another rule checks
        if name in view.stored or coded or view.folder.in_unread_file(name):
            continue
        stacked = f", or those of each expert of {tensor.module}" if tensor.stacked else ""
        yield finding("missing-tensor", name, f"not in any file; expected {list(tensor.shape)}{stacked}")


def _extra(view: View) -> Iterator[Finding]:
    raw = view.folder.config
    predicts = any(raw.get(key) for key in _PREDICTION)
    owners = {tensor.name: module for module, coded in view.coded.items() for tensor in coded.tensors.values()}
    expected = {tensor.module for tensor in view.expected.values() if tensor.linear is not None or tensor.stacked}
    embedded = {tensor.module for tensor in view.expected.values() if is_embedding(tensor.module)}
    known = expected | embedded | {"lm_head"}
    for name, tensor in view.stored.items():
        module = name.rpartition(".")[0]
        if name in view.expected or is_derived_buffer(name) or _OF_ACTIVATIONS.fullmatch(name):
            continue
        if name == "lm_head.weight" or owners.get(name) in known or (predicts and is_extra_layer(name, raw)):
            continue
        if name.endswith(".bias") and module in view.coded and isinstance(view.method, Gptq | Awq):
            continue  # zeros that their writers add; vLLM and GPTQModel skip them
        yield finding("extra-tensor", name, f"{tensor.dtype} {list(tensor.shape)}, which the config does not call for")


def _shapes(view: View) -> Iterator[Finding]:
    rows = view.rows_of_embedding()
    for name, tensor in view.expected.items():
        found = view.stored.get(name)
        coded = view.coded.get(tensor.module)
        shape = found.shape if found is not None and coded is None else coded.unpacked_shape if coded else None
        if shape is not None and rows is not None and tensor.module in ("lm_head", "model.embed_tokens"):
            shape = tensor.shape if shape == (rows, *tensor.shape[1:]) else shape  # another rule checks vocab_size
        allowed = [tensor.shape]
        if tensor.stacked is not None:  # some stacked experts have inputs before outputs
            allowed.append((*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2]))
        if shape is not None and shape not in allowed:
            yield finding("wrong-shape", name, f"found {list(shape)}, expected {list(tensor.shape)}")
        if found is not None and coded is None and found.dtype not in FLOATS:
            yield finding("wrong-type", name, f"found {found.dtype}, expected floats")


def _dropped(view: View) -> Iterator[Finding]:
    raw, stored = view.folder.config, view.stored
    if not stored or not view.folder.complete:
        return
    parts = [raw, *(part for part in raw.values() if isinstance(part, dict))]
    for key, count in ((key, part.get(key)) for part in parts for key in _PREDICTION):
        if type(count) is int and count > 0 and not any(is_extra_layer(name, raw) for name in stored):
            yield finding("dropped-prediction", "config.json", f"{key} is {count}")
    for key, words in _TOWERS.items():
        if isinstance(raw.get(key), dict) and not any(word in name.lower() for name in stored for word in words):
            yield finding("dropped-tower", "config.json", f"{key}, and no tensor with such a name")
