"""``adapter_config.json`` of PEFT: the settings that a merge needs, and a refusal of those that it does not know."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.json_values import Settings, read_settings, shown

NAME = "adapter_config.json"

_USED = frozenset({
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "base_model_name_or_path", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "init_lora_weights", "ensure_weight_tying", "modules_to_save",
})  # fmt: skip
_SHOWN_BY_TENSORS = frozenset({"bias", "lora_bias"})
_TRAINING_ONLY = frozenset({
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "runtime_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",  # of initializations, see `init_lora_weights`
    "megatron_core", "qalora_group_size",  # without effect unless another key is set
})  # fmt: skip
KNOWN = _USED | _SHOWN_BY_TENSORS | _TRAINING_ONLY
"""Keys that are used, or do not change the merged weights. Any other key is refused if it has a value."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is; others train against a changed base."""
_MAX_RANK = 1 << 20
_MAX_ALPHA = 1e9

Value = TypeVar("Value")


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of a LoRA adapter.

    Attributes:
        rank, alpha: of modules that no pattern matches.
        rank_pattern, alpha_pattern: regular expressions of module names, in order, with their values.
        rank_stabilized: whether alpha is divided by the square root of the rank (rsLoRA).
        dora: whether weights are decomposed into magnitude and direction (DoRA).
        transposed: whether some weights of the base are [inputs, outputs].
        ties_weights: whether an adapter of the embedding also applies to a head that is tied to it.
        base_model: the base that it names; None if it names none.
        targets: the modules that it changes: their last parts, or one regular expression; None if it does not say.
        is_partial: whether it leaves out some modules that `targets` matches.
        saved: the modules that it replaces, by their last parts; the base need not have all of them.
    """

    path: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    dora: bool
    transposed: bool
    ties_weights: bool
    base_model: str | None
    targets: tuple[str, ...] | str | None
    is_partial: bool
    saved: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """The rank of a module, by its name in the base."""
        return _matched(self.rank_pattern, module, self.rank)

    def scaling(self, module: str) -> float:
        """The factor of a module's update."""
        rank = self.rank_of(module)
        return _matched(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)

    def is_target(self, module: str) -> bool:
        """Whether `targets` matches a module; true if it does not say."""
        if self.targets is None:
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == one or module.endswith(f".{one}") for one in self.targets)


def own_adapter_note(folder: Path) -> list[str]:
    """A note if a model's folder also holds an adapter."""
    if not (folder / NAME).is_file():
        return []
    return [f"{folder / NAME}: the folder also holds a LoRA adapter, which is not merged; `lora` of convert does that"]


def read_config(folder: Path) -> AdapterConfig:
    """The settings of the adapter in a folder.

    Raises:
        CheckpointError: if the file is missing or damaged.
        UnsupportedError: if it is no LoRA adapter, or has settings that change the result in a way that is not known.
    """
    path = folder / NAME
    raw = read_settings(path)
    settings = Settings(raw, path)
    if (kind := settings.string("peft_type")) != "LORA":
        raise UnsupportedError("is an adapter of another kind", path=path, found=shown(kind), expected="LORA")
    for key, value in raw.items():
        if key not in KNOWN and value not in (None, False, {}, [], ""):
            raise UnsupportedError(
                f"'{key}' is not supported in an adapter", path=path, found=shown(value),
                hint="merge it with PEFT's `merge_and_unload`",
            )  # fmt: skip
    _require_unchanged_base(raw.get("init_lora_weights", True), path)
    if (raw.get("bias") or "none") not in ("none", "all", "lora_only"):
        raise UnsupportedError("unknown value of 'bias'", path=path, found=shown(raw["bias"]))
    found = AdapterConfig(
        path, settings.integer("r", 1, _MAX_RANK), settings.number("lora_alpha", -_MAX_ALPHA, _MAX_ALPHA),
        {key: one.integer(key, 1, _MAX_RANK) for key, one in _pattern(settings, "rank_pattern")},
        {key: one.number(key, -_MAX_ALPHA, _MAX_ALPHA) for key, one in _pattern(settings, "alpha_pattern")},
        settings.flag("use_rslora", False), settings.flag("use_dora", False), settings.flag("fan_in_fan_out", False),
        settings.flag("ensure_weight_tying", False),
        settings.string("base_model_name_or_path") if settings.has("base_model_name_or_path") else None,
        _targets(settings),
        any(raw.get(key) not in (None, []) for key in ("exclude_modules", "layers_to_transform")),
        tuple(settings.strings("modules_to_save")) if settings.has("modules_to_save") else (),
    )  # fmt: skip
    expressions = [*found.rank_pattern, *found.alpha_pattern]
    _require_expressions(expressions + ([found.targets] if isinstance(found.targets, str) else []), path)
    return found


def _require_unchanged_base(method: Any, path: Path) -> None:
    if method not in _KEEPS_BASE:
        raise UnsupportedError(
            "'init_lora_weights' names a method that changes the base before training", path=path,
            found=shown(method), expected="true, false, gaussian, eva or orthogonal",
            hint="convert it to plain LoRA with PEFT's `save_pretrained(path_initial_model_for_weight_conversion=...)`",
        )  # fmt: skip


def _pattern(settings: Settings, key: str) -> Iterable[tuple[str, Settings]]:
    found = settings.values.get(key) or {}
    if not isinstance(found, dict):
        settings.wrong_type(key, "an object")
    inner = Settings(found, settings.path, key)
    return [(name, inner) for name in found]


def _targets(settings: Settings) -> tuple[str, ...] | str | None:
    found = settings.values.get("target_modules")
    if found is None or found == "all-linear":
        return None
    return found if isinstance(found, str) else tuple(settings.strings("target_modules"))


def _require_expressions(expressions: Iterable[str], path: Path) -> None:
    for one in expressions:
        try:
            re.compile(rf"(.*\.)?({one})$")
        except re.error as error:
            raise CheckpointError(
                f"holds an invalid regular expression: {error}", path=path, found=shown(one)
            ) from error


def _matched(pattern: Mapping[str, Value], module: str, default: Value) -> Value:
    """The value of the first expression that matches the end of a module's name, from the start of a part on."""
    return next((pattern[one] for one in pattern if re.match(rf"(.*\.)?({one})$", module)), default)
