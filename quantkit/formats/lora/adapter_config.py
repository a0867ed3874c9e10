"""``adapter_config.json`` of PEFT: the settings that a merge needs, and a refusal of those that
it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantkit.base.json_values import Settings, format_value, read_settings
from quantkit.base.messages import Message, Option
from quantkit.base.patterns import MatchTime, Pattern
from quantkit.errors import UnsupportedError
from quantkit.formats.lora.target_modules import TargetModules

NAME = "adapter_config.json"

_USED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "fan_in_fan_out",
        "base_model_name_or_path",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "ensure_weight_tying",
        "modules_to_save",
    }
)
# The file of tensors has the biases that these settings add.
_SHOWN_BY_TENSORS = frozenset({"bias", "lora_bias"})
_TRAINING_ONLY = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "runtime_config",
        # Of initializations: `init_lora_weights` tells whether one changed the base.
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        # Their defaults are not empty, but they have no effect unless `megatron_config` or
        # `use_qalora` is set, which are refused.
        "megatron_core",
        "qalora_group_size",
    }
)
KNOWN = _USED | _SHOWN_BY_TENSORS | _TRAINING_ONLY
"""Keys that are used, or do not change the merged weights.

Any other key is refused if it has a value.
"""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base as it is; others train against a changed
base.
"""
_MAX_RANK = 1 << 20
_MAX_ALPHA = 1e9

Value = TypeVar("Value")


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of a LoRA adapter.

    Attributes:
        rank, alpha: of modules that no pattern matches.
        rank_patterns, alpha_patterns: patterns of module names, in order, with their values.
        rank_stabilized: whether alpha is divided by the square root of the rank (rsLoRA).
        dora: whether weights are decomposed into magnitude and direction (DoRA).
        transposed: what ``fan_in_fan_out`` says of weights; PEFT follows the class of a module
            instead.
        ties_weights: whether an adapter of the embedding also applies to a head that is tied to it.
        base_model: the base that it names; None if it names none.
        targets: the modules that it changes.
        saved: the modules that it replaces, by their last parts; the base need not have all of
            them.
    """

    path: Path
    rank: int
    alpha: float
    rank_patterns: list[tuple[Pattern, int]]
    alpha_patterns: list[tuple[Pattern, float]]
    rank_stabilized: bool
    dora: bool
    transposed: bool
    ties_weights: bool
    base_model: str | None
    targets: TargetModules
    saved: tuple[str, ...]

    def rank_of(self, module: str) -> int:
        """Find the rank of a module, by its name in the base."""
        return _find_value(self.rank_patterns, module, self.rank)

    def scaling(self, module: str) -> float:
        """Compute the factor of a module's update from its rank and alpha."""
        rank = self.rank_of(module)
        alpha = _find_value(self.alpha_patterns, module, self.alpha)
        # rsLoRA, https://arxiv.org/abs/2312.03732: updates of high ranks stay as large.
        if self.rank_stabilized:
            return alpha / math.sqrt(rank)
        return alpha / rank


def note_folder_adapter(folder: Path) -> list[str]:
    """Write a note if a model's folder also holds an adapter."""
    if not (folder / NAME).is_file():
        return []
    return [
        Message(
            f"{folder / NAME}: the folder also contains a LoRA adapter, which is not merged; ",
            Option("lora", job="convert"),
            " does that",
        )
    ]


def read_config(folder: Path) -> AdapterConfig:
    """Read the settings of the adapter in a folder, and refuse those that a merge would ignore.

    Raises:
        CheckpointError: if the file is missing or damaged.
        UnsupportedError: if it is no LoRA adapter, or has settings that change the result in a way
            that is not known.
    """
    path = folder / NAME
    raw = read_settings(path)
    settings = Settings(raw, path)
    kind = settings.string("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            "is an adapter of an unsupported type",
            path=path,
            found=format_value(kind),
            expected="LORA",
        )
    # PEFT writes every setting that it has, so those that an adapter does not use are empty.
    for key, value in raw.items():
        if key not in KNOWN and value not in (None, False, {}, [], ""):
            raise UnsupportedError(
                f"'{key}' is not supported in an adapter",
                path=path,
                found=format_value(value),
                hint="merge it with PEFT's `merge_and_unload()`",
            )
    _require_unchanged_base(raw.get("init_lora_weights", True), path)
    bias = raw.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise UnsupportedError(
            "unknown value of 'bias'", path=path, found=format_value(raw["bias"])
        )
    # The patterns come from a file that may be hostile: all of them share one limit of time.
    match_time = MatchTime(str(path))
    ranks = _read_object(settings, "rank_pattern")
    alphas = _read_object(settings, "alpha_pattern")
    rank = settings.integer("r", 1, _MAX_RANK)
    alpha = settings.number("lora_alpha", -_MAX_ALPHA, _MAX_ALPHA)
    rank_patterns: list[tuple[Pattern, int]] = []
    for name in ranks.values:
        pattern = _compile_end_pattern(name, ranks, match_time)
        rank_patterns.append((pattern, ranks.integer(name, 1, _MAX_RANK)))
    alpha_patterns: list[tuple[Pattern, float]] = []
    for name in alphas.values:
        pattern = _compile_end_pattern(name, alphas, match_time)
        alpha_patterns.append((pattern, alphas.number(name, -_MAX_ALPHA, _MAX_ALPHA)))
    rank_stabilized = settings.flag("use_rslora", False)
    dora = settings.flag("use_dora", False)
    transposed = settings.flag("fan_in_fan_out", False)
    ties_weights = settings.flag("ensure_weight_tying", False)
    base_model: str | None = None
    if settings.has("base_model_name_or_path"):
        base_model = settings.string("base_model_name_or_path")
    targets = TargetModules(settings, match_time)
    saved: tuple[str, ...] = ()
    if settings.has("modules_to_save"):
        saved = tuple(settings.strings("modules_to_save"))
    return AdapterConfig(
        path=path,
        rank=rank,
        alpha=alpha,
        rank_patterns=rank_patterns,
        alpha_patterns=alpha_patterns,
        rank_stabilized=rank_stabilized,
        dora=dora,
        transposed=transposed,
        ties_weights=ties_weights,
        base_model=base_model,
        targets=targets,
        saved=saved,
    )


def _require_unchanged_base(method: Any, path: Path) -> None:
    # LoRA's update is relative to the weights that training began with. PiSSA, OLoRA and others
    # subtract a part from the base first, and the published base still has it.
    if method not in _KEEPS_BASE:
        raise UnsupportedError(
            "'init_lora_weights' names a method that changes the base before training",
            path=path,
            found=format_value(method),
            expected="true, false, gaussian, eva or orthogonal",
            hint=(
                "convert it to plain LoRA with PEFT's"
                " `save_pretrained(path_initial_model_for_weight_conversion=...)`"
            ),
        )


def _read_object(settings: Settings, key: str) -> Settings:
    """Read the object of a key; an empty one if it is absent."""
    if settings.values.get(key):
        return settings.inside(key)
    return Settings({}, settings.path, key)


def _compile_end_pattern(name: str, settings: Settings, match_time: MatchTime) -> Pattern:
    """Compile a pattern of the end of a module's name, from the start of a part on, as PEFT's
    `get_pattern_key`.
    """
    return Pattern(
        name, key=f"'{settings.name}'", match_time=match_time, prefix=r"(.*\.)?(", suffix=")$"
    )


def _find_value(patterns: Iterable[tuple[Pattern, Value]], module: str, default: Value) -> Value:
    """Find the value of the first pattern that matches a module, as PEFT does."""
    for pattern, value in patterns:
        if pattern.match(module):
            return value
    return default
