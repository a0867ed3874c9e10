"""Which tensors of a folder are weights of linears, as transformers' own modules say; it is used
where it is there.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.architectures.config import Limits, ModelConfig, OpaqueTensor
from quantkit.architectures.families.opaque import (
    LINEARS,
    Hints,
    infer_roles_by_name,
    is_tied,
    may_be_linear,
    recurrent_modules,
    with_roles,
)
from quantkit.base.json_values import format_value, within
from quantkit.errors import QuantkitError, UnsupportedError
from quantkit.via_transformers.own_code import iter_architecture_classes, load_code_classes

Role = tuple[str, str | None]
# What is counted stands last in such names.
_COUNTED = re.compile(r"(.+_)?(layers?|blocks|stages|depths?|experts)")
_STATES = frozenset({"update_recurrent_state", "update_conv_state"})  # of transformers' cache
_SETTINGS = ("quantization_config",)
_NOT_OF_THE_MODEL = (*_SETTINGS, "auto_map", "_name_or_path")


def with_linears(
    config: ModelConfig, raw: Mapping[str, Any], path: Path
) -> tuple[ModelConfig, str, list[str]]:
    """Return a model known by its tensors, with the weights of its linears determined.

    Args:
        raw: its config.json.
        path: of the folder, for notes.

    Returns:
        The model; how it is known, for the manifest; and notes for the user.

    Raises:
        UnsupportedError: if all its linears are of another kind.
    """
    assert config.tensors is not None
    try:
        name, roles, unstored = _roles(config.tensors, raw, path, config.code)
    except NotKnown as reason:
        why = f"{path}: {reason}; linear layers are recognized by their names"
        return with_roles(config, infer_roles_by_name(raw, config.tensors)), "names", [why]
    if config.code is None:
        whose = "transformers'"
    else:
        whose = "the folder's"
    return with_roles(config, roles, unstored), f"the modules of {whose} {name}", []


class NotKnown(Exception):
    """Why transformers can't say which linears a model has."""


def _roles(
    tensors: tuple[OpaqueTensor, ...], raw: Mapping[str, Any], path: Path, code: Path | None
) -> tuple[str, dict[str, Role], tuple[str, ...]]:
    """Return the class, role and alias of the tensors that are weights of linears, and the linears
    that have none.
    """
    try:
        importlib.import_module("transformers")
    except ImportError:
        raise NotKnown("transformers is not installed") from None
    with quiet():
        try:
            found, config = model_class(raw, code)
            with torch.device("meta"):
                model = found(config)
            alone = (tensor for tensor in tensors if may_be_linear(tensor) and tensor.stack is None)
            names = targets(model, [tensor.name for tensor in alone])
        except (NotKnown, QuantkitError):
            raise
        except Exception as error:  # of the code of any model, given any config
            message = " ".join(str(error).split())
            reason = f"{type(error).__name__}: {format_value(message)}"
            raise NotKnown(f"the model cannot be built from its config ({reason})") from error
    roles = _with_linears(model, names, tensors, raw)
    turned = next(
        (name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"), None
    )
    # Weights are [I, O], as GPT-2 has them.
    if turned and all(role in ("float", "head") for role, _ in roles.values()):
        raise UnsupportedError(
            "the weights of its linear layers lie transposed (Conv1D), they are not rounded",
            path=path,
            found=turned,
        )
    stored = {alias or name.removesuffix(".weight") for name, (_, alias) in roles.items()}
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return type(model).__name__, roles, tuple(name for name in linears if name not in stored)


def is_known(raw: Mapping[str, Any]) -> bool:
    """Return whether the installed transformers knows the architecture of a config.json."""
    mapping: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind in mapping.CONFIG_MAPPING


def is_headless(model: Any) -> bool:
    """Return whether a model is of the class that transformers has for the body alone."""
    mapping: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    body = mapping.MODEL_MAPPING.get(type(model.config), None)
    return type(model) is body and model.get_output_embeddings() is None


def auto_class(raw: Mapping[str, Any]) -> str:
    """Return the class of transformers that a user loads a model with, by its config.json."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = str(raw.get("model_type"))
    classes = raw.get("architectures")
    causal, with_images = (
        one.get(kind)
        for one in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    )
    named = isinstance(classes, list) and with_images in classes
    if with_images and (named or not causal):
        return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM"


def model_class(raw: Mapping[str, Any], code: Path | None = None) -> tuple[Any, Any]:
    """Return the class of a model and its config, from its config.json.

    Args:
        code: the folder whose code is run; None for a class of transformers.

    Raises:
        NotKnown: if transformers has no class for it, or its numbers are absurd.
        QuantkitError: as `load_code_classes`.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    kind = raw.get("model_type")
    classes = raw.get("architectures")
    if code is not None:
        _require_sane(raw)
        found, known = load_code_classes(raw, code)
        return found, _config(known, {**raw, "_name_or_path": str(code)}, _SETTINGS)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise NotKnown(f"transformers does not know {format_value(kind)}")
    _require_sane(raw)
    config = _config(CONFIG_MAPPING[kind], raw, _NOT_OF_THE_MODEL)
    known_classes = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
    by_type = filter(None, (known_class_.get(type(config), None) for known_class_ in known_classes))
    found = next(iter_architecture_classes(raw), None) or next(by_type, None)
    if not isinstance(found, type):
        raise NotKnown(f"transformers has no class for {format_value(classes or kind)}")
    return found, config


def _config(config_class: Any, raw: Mapping[str, Any], skipped: Sequence[str]) -> Any:
    """Return a config of a class in float32, from a config.json without some of its keys."""
    stated = {key: value for key, value in raw.items() if key not in skipped}
    # Infinities, as its own files spell.
    config = config_class.from_dict(config_class._decode_special_floats(copy.deepcopy(stated)))
    _set_float32(config)
    return config


def _set_float32(config: Any) -> None:
    """Let a model of a config compute in float32, and all its parts: transformers builds each in
    the type that its own part of the config states, and keeps that when it loads weights.
    """
    config.dtype = torch.float32
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _set_float32(part)


def _require_sane(raw: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and experts for which modules would fill the memory."""
    for part in within(dict(raw)):
        for key, value in part.items() if isinstance(part, dict) else ():
            counted = _COUNTED.fullmatch(key)
            if counted is None:
                max_count = 2**40
            elif counted[2] == "experts":
                max_count = Limits.experts
            else:
                max_count = Limits.layers
            if type(value) is int and not -Limits.width <= value <= max_count:
                raise NotKnown(f"its config's '{key}' is {format_value(value)}")


def targets(
    model: Any, names: Iterable[str], mapping: Sequence[Any] | None = None
) -> dict[str, tuple[str, str | None]]:
    """Return what the model calls tensors on disk, as transformers' own loader renames, merges and
    splits them, in its order; those that it does not have are left out. A tensor that is not a
    parameter by itself gets the name of the first that it is part of, and the pattern of what
    merges or splits it.

    Args:
        mapping: of names and tensors; None is the model's.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    if mapping is None:
        mapping = get_model_conversion_mapping(model)
    else:
        mapping = mapping
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    known = dict(model.state_dict())
    result = {}
    for stored in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(
            stored, renamings, converters, model.base_model_prefix, known
        )
        if name not in known and stored in known:
            name, pattern = rename_source_key(stored, [], [], model.base_model_prefix, known)
        if name in known:
            result[stored] = name, pattern
    return result


def _with_linears(
    model: Any,
    names: Mapping[str, tuple[str, str | None]],
    tensors: tuple[OpaqueTensor, ...],
    raw: Mapping[str, Any],
) -> dict[str, Role]:
    """Role and alias of each tensor that is the weight of a linear, by its name."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    if model.base_model is model:
        inside = None
    else:
        inside = {id(module) for module in model.base_model.modules()}
    tied = (
        is_tied(raw)
        or getattr(model.config.get_text_config(), "tie_word_embeddings", False) is True
    )
    precise = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    on_disk = Hints.of(raw, {tensor.name: tensor.shape for tensor in tensors})
    hints = replace(on_disk, tied=tied, recurrent=on_disk.recurrent | _recurrent(modules))
    of_text = _text_part(model, modules)
    result: dict[str, Role] = {}
    for tensor in tensors:
        if tensor.stack is not None:
            called = tensor.alias or tensor.module
            role = hints.role(tensor, called) or (
                "linear" if called.startswith(of_text) else "tower"
            )
            result[tensor.name] = role, tensor.alias
        if tensor.name not in names:
            continue
        name, merged = names[tensor.name]
        called = name.rpartition(".")[0]
        module = modules.get(called)
        hinted = hints.role(tensor, called)
        if called == tensor.module:
            alias = None
        else:
            alias = called
        if not isinstance(module, nn.Linear):
            if merged and hinted is None and _is_expert(tensor):
                # One of those that the loader stacks.
                result[tensor.name] = "linear", None
            continue
        if module is head:
            role = "float" if tied else "head"
        elif _routes(module) or merged or tuple(module.weight.shape) != tensor.shape:
            role = "float"
        elif precise.intersection(called.split(".")):
            # Its class keeps it in float32.
            role = "float"
        else:
            role = hinted or "linear"
            if role == "linear" and not called.startswith(of_text):
                if inside is None or id(module) in inside:
                    role = "tower"
                else:
                    role = "head"
        result[tensor.name] = role, alias
    return result


def _text_part(model: Any, modules: Mapping[str, nn.Module]) -> str:
    """Return how the names of modules that process text begin: those of the decoder, where the
    model has other parts.
    """
    decoder = model.get_decoder()
    layered = isinstance(decoder, nn.Module) and any(
        isinstance(module, nn.ModuleList) for module in decoder.modules()
    )
    name = next((name for name, module in modules.items() if layered and module is decoder), "")
    return f"{name}." if name else ""


def _recurrent(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Return the names of modules that carry a state: by what they hold, and by what their code
    does with a cache.
    """
    model = modules[""]
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    classes = set()
    for cls in {type(module) for module in modules.values()}:
        if _updates_state(cls):
            classes.add(cls)
    by_code = {name for name, module in modules.items() if name and type(module) in classes}
    return recurrent_modules({name: tuple(tensor.shape) for name, tensor in held.items()}) | by_code


def _updates_state(cls: type) -> bool:
    """Return whether the code of a module's class updates the state of linear attention or of a
    convolution in a cache.
    """
    functions = (
        inspect.unwrap(var)
        for own in cls.__mro__
        for var in vars(own).values()
        if inspect.isfunction(var)
    )
    return any(not _STATES.isdisjoint(function.__code__.co_names) for function in functions)


def _routes(module: nn.Linear) -> bool:
    """Return whether the class of a linear is a router's; other classes of linears are linears."""
    name = type(module).__name__.lower()
    return type(module) is not nn.Linear and any(
        word in name for word in ("router", "gate", "gating")
    )


def _is_expert(tensor: OpaqueTensor) -> bool:
    """Return whether a matrix on disk is a linear of one expert of a mixture."""
    *parents, last = tensor.module.split(".")
    return (
        last in LINEARS and len(parents) > 1 and parents[-1].isdecimal() and "expert" in parents[-2]
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers logs, warns of and shows the progress of."""
    bars_of: Any = importlib.import_module("transformers.utils.logging")
    log = logging.getLogger("transformers")
    before = log.level
    bars = bars_of.is_progress_bar_enabled()
    log.setLevel(logging.CRITICAL)
    bars_of.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(before)
        if bars:
            bars_of.enable_progress_bar()
