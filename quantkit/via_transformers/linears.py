"""Determine which tensors of a folder are weights of linears, from transformers' own modules if it
is installed.
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
from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.base.json_values import collect_values, format_value
from quantkit.errors import QuantkitError
from quantkit.via_transformers.own_code import iter_architecture_classes, load_code_classes

Role = tuple[str, str | None]
# Such names end in what they count.
_COUNTED = re.compile(r"(.+_)?(layers?|blocks|stages|depths?|experts)")
# Methods of transformers' cache.
_STATES = frozenset({"update_recurrent_state", "update_conv_state"})
# The model is built with floats.
_SETTINGS = ("quantization_config",)
_NOT_OF_THE_MODEL = (*_SETTINGS, "auto_map", "_name_or_path")


def with_linears(
    config: ModelConfig, raw: Mapping[str, Any], path: Path
) -> tuple[ModelConfig, str, list[str]]:
    """Determine the weights of linears in the config of a model known by its tensors.

    Args:
        raw: its config.json.
        path: of the folder, for notes.

    Returns:
        The model; how it is known, for the manifest; and notes for the user.
    """
    assert config.tensors is not None
    try:
        name, roles, unstored = _roles(config.tensors, raw, config.code)
    except NotKnown as reason:
        why = f"{path}: {reason}; linear layers are recognized by their names"
        return with_roles(config, infer_roles_by_name(raw, config.tensors)), "names", [why]
    if config.code is None:
        whose = "transformers'"
    else:
        whose = "the folder's"
    return with_roles(config, roles, unstored), f"the modules of {whose} {name}", []


class NotKnown(Exception):
    """The reason why transformers cannot show which linears a model has."""


def _roles(
    tensors: tuple[OpaqueTensor, ...], raw: Mapping[str, Any], code: Path | None
) -> tuple[str, dict[str, Role], tuple[str, ...]]:
    """Determine the model's class, the role and alias of the tensors that are weights of linears,
    and the linears without a stored weight.
    """
    try:
        importlib.import_module("transformers")
    except ImportError:
        raise NotKnown("transformers is not installed") from None
    # Linears of experts that one tensor has on disk are recognized by that tensor.
    separate_names: list[str] = []
    for tensor in tensors:
        if may_be_linear(tensor) and not _is_stacked(tensor):
            separate_names.append(tensor.name)
    with quiet():
        try:
            cls, config = model_class(raw, code)
            with torch.device("meta"):
                model = cls(config)
            names = targets(model, separate_names)
        except (NotKnown, QuantkitError):
            raise
        # The code of a model, given any config, can raise anything.
        except Exception as error:
            reason = describe_foreign_error(error)
            raise NotKnown(f"the model cannot be built from its config ({reason})") from error
    roles = _with_linears(model, names, tensors, raw)
    stored: set[str] = set()
    for name, (_, alias) in roles.items():
        stored.add(alias or name.removesuffix(".weight"))
    unstored: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in stored:
            unstored.append(name)
    return type(model).__name__, roles, tuple(unstored)


def is_known(raw: Mapping[str, Any]) -> bool:
    """Check that the installed transformers knows the architecture of a config.json."""
    mapping: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind in mapping.CONFIG_MAPPING


def is_headless(model: Any) -> bool:
    """Check that a model is of the class that transformers has for the body alone."""
    mapping: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    body = mapping.MODEL_MAPPING.get(type(model.config), None)
    return type(model) is body and model.get_output_embeddings() is None


def auto_class(raw: Mapping[str, Any]) -> str:
    """Choose the class of transformers with which a user loads a model, by its config.json."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = str(raw.get("model_type"))
    classes = raw.get("architectures")
    causal_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    image_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    names_image_class = isinstance(classes, list) and image_class in classes
    # A type can have both classes.
    if image_class and (names_image_class or not causal_class):
        return "AutoModelForImageTextToText"
    return "AutoModelForCausalLM"


def model_class(raw: Mapping[str, Any], code: Path | None = None) -> tuple[Any, Any]:
    """Find the class of a model and build its config, from its config.json.

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
        cls, config_class = load_code_classes(raw, code)
        # As in a config that transformers loads itself, `_name_or_path` is the folder.
        return cls, _config(config_class, {**raw, "_name_or_path": str(code)}, _SETTINGS)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise NotKnown(f"transformers does not know {format_value(kind)}")
    _require_sane(raw)
    config = _config(CONFIG_MAPPING[kind], raw, _NOT_OF_THE_MODEL)
    # The class that the config names; or the causal language model of its type; or the body alone.
    cls = next(iter_architecture_classes(raw), None)
    if not cls:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not cls:
        cls = MODEL_MAPPING.get(type(config), None)
    if not isinstance(cls, type):
        raise NotKnown(f"transformers has no class for {format_value(classes or kind)}")
    return cls, config


def _config(config_class: Any, raw: Mapping[str, Any], skipped: Sequence[str]) -> Any:
    """Build a config of a class in float32, from a config.json without some of its keys."""
    fields = {key: value for key, value in raw.items() if key not in skipped}
    # transformers writes infinities as ``{"__float__": "Infinity"}``, which JSON can express.
    decoded = config_class._decode_special_floats(copy.deepcopy(fields))
    config = config_class.from_dict(decoded)
    _set_float32(config)
    return config


def _set_float32(config: Any) -> None:
    """Make a model of a config compute in float32, with all its parts: transformers builds each in
    the type that its own part of the config has, and keeps it when it loads weights.
    """
    config.dtype = torch.float32
    # RWKV divides weights in place, outside their modules, which only float16 needs.
    if hasattr(config, "rescale_every"):
        config.rescale_every = 0
    for name in config.sub_configs:
        sub_config = getattr(config, name, None)
        if sub_config is not None:
            _set_float32(sub_config)


def _require_sane(raw: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and experts for which modules would fill the memory."""
    for part in collect_values(dict(raw)):
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
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
    """Find the parameters of the model that tensors on disk become, as transformers' own loader
    renames, merges and splits them, in its order. Tensors that the model does not have are left
    out. A tensor that is not a parameter by itself gets the name of the first parameter that it is
    part of, and the pattern that merges or splits it.

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
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    state = dict(model.state_dict())
    prefix = model.base_model_prefix
    parameter_of: dict[str, tuple[str, str | None]] = {}
    for stored in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
        # As the loader does, a name that the model has is kept if renaming leads nowhere.
        if name not in state and stored in state:
            name, pattern = rename_source_key(stored, [], [], prefix, state)
        if name in state:
            parameter_of[stored] = (name, pattern)
    return parameter_of


def _with_linears(
    model: Any,
    names: Mapping[str, tuple[str, str | None]],
    tensors: tuple[OpaqueTensor, ...],
    raw: Mapping[str, Any],
) -> dict[str, Role]:
    """Determine the role and alias of each tensor that is the weight of a linear, by its name."""
    from transformers.pytorch_utils import Conv1D

    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    # Modules outside of the base model are heads.
    if model.base_model is model:
        inside = None
    else:
        inside = {id(module) for module in model.base_model.modules()}
    text_config = model.config.get_text_config()
    tied = is_tied(raw) or getattr(text_config, "tie_word_embeddings", False) is True
    precise = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    on_disk = Hints.of(raw, {tensor.name: tensor.shape for tensor in tensors})
    hints = replace(on_disk, tied=tied, recurrent=on_disk.recurrent | _recurrent(modules))
    text_prefix = _text_part(model, modules)
    roles: dict[str, Role] = {}
    for tensor in tensors:
        if _is_stacked(tensor):
            module_name = tensor.alias or tensor.module
            default_role = "linear" if module_name.startswith(text_prefix) else "tower"
            roles[tensor.name] = hints.role(tensor, module_name) or default_role, tensor.alias
        if tensor.name not in names:
            continue
        parameter_name, pattern = names[tensor.name]
        module_name = parameter_name.rpartition(".")[0]
        module = modules.get(module_name)
        hinted_role = hints.role(tensor, module_name)
        if module_name == tensor.module:
            alias = None
        else:
            alias = module_name
        if not isinstance(module, nn.Linear | Conv1D):
            # An expert that the loader stacks has no module of its own.
            if pattern and hinted_role is None and _is_expert(tensor):
                roles[tensor.name] = "linear", None
            continue
        if module is head:
            role = "float" if tied else "head"
        elif _routes(module) or not _fits(tensor, module, merged=pattern is not None):
            role = "float"
        elif precise.intersection(module_name.split(".")):
            # Its class keeps it in float32.
            role = "float"
        else:
            role = hinted_role or "linear"
            if role == "linear" and not module_name.startswith(text_prefix):
                if inside is None or id(module) in inside:
                    role = "tower"
                else:
                    role = "head"
        roles[tensor.name] = role, alias
    return roles


def _text_part(model: Any, modules: Mapping[str, nn.Module]) -> str:
    """Find the prefix of the names of modules that process text: the decoder's, if the model has
    other parts; else empty.
    """
    decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module):
        return ""
    # Only a module with layers can be the decoder.
    if not any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
        return ""
    for name, module in modules.items():
        if module is decoder:
            return f"{name}." if name else ""
    return ""


def _recurrent(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Find the names of modules that carry a state: by their tensors, and by what their code does
    with a cache.
    """
    model = modules[""]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shapes[name] = tuple(parameter.shape)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        shapes[name] = tuple(buffer.shape)
    # Each class is inspected once, though it may have hundreds of modules.
    updates_state: dict[type, bool] = {}
    by_code: set[str] = set()
    for name, module in modules.items():
        cls = type(module)
        if cls not in updates_state:
            updates_state[cls] = _updates_state(cls)
        if name and updates_state[cls]:
            by_code.add(name)
    return recurrent_modules(shapes) | by_code


def _updates_state(cls: type) -> bool:
    """Check that the code of a module's class updates the state of linear attention or of a
    convolution in a cache.
    """
    for base in cls.__mro__:
        for attribute in vars(base).values():
            if not inspect.isfunction(attribute):
                continue
            # Decorators hide the code of `forward`.
            function = inspect.unwrap(attribute)
            if not _STATES.isdisjoint(function.__code__.co_names):
                return True
    return False


def _fits(tensor: OpaqueTensor, module: nn.Module, *, merged: bool) -> bool:
    """Check that a weight on disk has the shape of a linear's module, or rows of its inputs if the
    loader merges it with others or splits it.
    """
    shape = tuple(module.get_parameter("weight").shape)
    if tensor.stack is not None:
        return tensor.stack.shape == shape
    if merged:
        return tensor.shape[1] == shape[1]
    return tensor.shape == shape


def _routes(module: nn.Module) -> bool:
    """Check that the class of a linear is a router's; other classes of linears are linears."""
    # A plain linear can be called a gate, as in an MLP.
    if type(module) is nn.Linear:
        return False
    name = type(module).__name__.lower()
    return any(word in name for word in ("router", "gate", "gating"))


def _is_stacked(tensor: OpaqueTensor) -> bool:
    """Check that one tensor on disk contains this linear of an expert and all others."""
    return tensor.stack is not None and tensor.stack.name != tensor.name


def _is_expert(tensor: OpaqueTensor) -> bool:
    """Check that a matrix on disk is a linear of one expert of a mixture."""
    *parents, last = tensor.module.split(".")
    if last not in LINEARS or len(parents) < 2:
        return False
    return parents[-1].isdecimal() and "expert" in parents[-2]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs, warnings and progress bars of transformers."""
    transformers_logging: Any = importlib.import_module("transformers.utils.logging")
    log = logging.getLogger("transformers")
    level = log.level
    shows_progress = transformers_logging.is_progress_bar_enabled()
    log.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(level)
        if shows_progress:
            transformers_logging.enable_progress_bar()
