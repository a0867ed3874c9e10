"""Granite 4, dense and with experts: Mamba-2 between layers with attention, and the multipliers of
Granite 3.

Its description is the code of transformers.
"""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ExpertsConfig, Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import Family, StackedExperts
from quantkit.architectures.families.keys import Keys, layer_count
from quantkit.architectures.families.llama import declare_granite_multipliers
from quantkit.architectures.families.mamba import (
    LINEAR,
    find_mixers,
    list_kinds,
    read_mamba,
    write_mamba,
)
from quantkit.architectures.names import BLOCK
from quantkit.base.json_values import Settings

# Transformers' defaults, if a key is absent.
_EXPERTS = 8
_PER_TOKEN = 2
_SHARED_SIZE = 1024
_ROTARY = "rope"


def _prepare(settings: Settings) -> Settings:
    """Rename keys to those of other families."""
    values = dict(settings.values)
    # A second name, which has precedence.
    if values.get("layers_block_type") is not None:
        values["layer_types"] = values["layers_block_type"]
    # `intermediate_size` is the width of experts only; a dense layer is a shared expert alone.
    if _count_experts(settings) == 0:
        values["intermediate_size"] = _read_shared_size(settings)
    return Settings(values, settings.path)


def _count_experts(settings: Settings) -> int:
    if "num_local_experts" not in settings.values:
        return _EXPERTS
    return settings.integer("num_local_experts", 0, Limits.experts)


def _read_shared_size(settings: Settings) -> int:
    if "shared_intermediate_size" not in settings.values:
        return _SHARED_SIZE
    return settings.integer("shared_intermediate_size", 1, Limits.width)


def _read_experts(settings: Settings) -> dict[str, Any]:
    count = _count_experts(settings)
    if count == 0:
        return {}
    per_token = _PER_TOKEN
    if "num_experts_per_tok" in settings.values:
        per_token = settings.integer("num_experts_per_tok", 1, Limits.experts)
    experts = ExpertsConfig(
        count=count,
        size=settings.integer("intermediate_size", 1, Limits.width),
        per_token=per_token,
        shared_size=_read_shared_size(settings),
    )
    return {"experts": experts}


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {"num_local_experts": 0, "shared_intermediate_size": config.intermediate_size}
    return {
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
        "shared_intermediate_size": config.experts.shared_size,
    }


def _read_layers(settings: Settings) -> dict[str, Any]:
    """Read the mixer of each layer, and whether queries and keys get rotary positions."""
    count = layer_count(settings)
    kinds = [LINEAR] * count
    if settings.has("layer_types"):
        kinds = settings.strings("layer_types")
    is_rotary = False
    # Published files without rotary positions say "nope"; any value but one has this meaning.
    if settings.has("position_embedding_type"):
        is_rotary = settings.string("position_embedding_type") == _ROTARY
    return {
        "mixers": find_mixers(kinds, settings),
        "rotary": [is_rotary] * count,
        "mamba2": read_mamba(settings),
    }


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    is_rotary = any(layer.rotary for layer in config.layers)
    return {
        "layer_types": list_kinds(config),
        "position_embedding_type": _ROTARY if is_rotary else "nope",
        **write_mamba(config),
    }


_EXPERT = BLOCK + "block_sparse_moe.experts.{expert}."
_STACK = BLOCK + "block_sparse_moe."
_SHARED_IN = BLOCK + "shared_mlp.input_linear"
_SHARED_OUT = BLOCK + "shared_mlp.output_linear"

GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    (
        keys.ATTENTION_BIAS,
        *declare_granite_multipliers(),
        Keys(_read_layers, _write_layers),
        Keys(_read_experts, _write_experts),
    ),
    options={"kv_heads_required": False},
    prepare=_prepare,
    in_mlx=False,
    names={
        "router": _STACK + "router.layer",
        "mlp.down": _SHARED_OUT,
        "shared_expert.down": _SHARED_OUT,
        "expert.gate": _EXPERT + "gate_proj",
        "expert.up": _EXPERT + "up_proj",
        "expert.down": _EXPERT + "down_proj",
    },
    fused={"mlp.gate_up": _SHARED_IN, "shared_expert.gate_up": _SHARED_IN},
    stacked=(
        StackedExperts(_STACK + "input_linear.weight", ("expert.gate", "expert.up")),
        StackedExperts(_STACK + "output_linear.weight", ("expert.down",)),
    ),
)
