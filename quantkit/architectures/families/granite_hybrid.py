"""Granite 4, dense and with experts: Mamba-2 between layers with attention, and the multipliers of
Granite 3.

Its description is the code of transformers.
"""

from __future__ import annotations

from typing import Any, Final

from quantkit.architectures.config import ExpertsConfig, Limits, Mamba2Config, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    Family,
    GgufArchitecture,
    StackedExperts,
)
from quantkit.architectures.families.keys import Keys, layer_count
from quantkit.architectures.families.llama import (
    GGUF_MULTIPLIERS,
    declare_granite_multipliers,
    read_gguf_multipliers,
)
from quantkit.architectures.families.mamba import (
    GGUF_MAMBA,
    GGUF_REFUSED,
    LINEAR,
    find_mixers,
    has_one_mixer,
    list_kinds,
    list_mamba_keys,
    read_gguf_mamba,
    read_mamba,
    write_gguf_mamba,
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


# llama.cpp has one architecture for Granite 4 and Bamba. Only Granite has multipliers and experts,
# and only Bamba rotates a part of each head.
_GGUF_ROTARY = "rope.scaling.finetuned"
"""In spite of its name: whether there are rotary positions."""
_GGUF_SHARED_SIZE = "expert_shared_feed_forward_length"
_GGUF_EXPANSION = 2


def _read_gguf(gguf: Settings, head_dim: int) -> dict[str, Any]:
    """Read the keys of both families, so that `bamba` recognizes its own."""
    mamba = read_gguf_mamba(gguf)
    is_rotary = gguf.flag(_GGUF_ROTARY, True)
    values = {
        **list_mamba_keys(mamba, gguf.integer("embedding_length", 1, Limits.width)),
        **read_gguf_multipliers(gguf, head_dim),
        "position_embedding_type": _ROTARY if is_rotary else "nope",
        "num_local_experts": 0,
        "shared_intermediate_size": gguf.integer("feed_forward_length", 1, Limits.width),
    }
    if gguf.values.get(EXPERT_KEYS[0]):
        values |= {
            "num_local_experts": gguf.integer(EXPERT_KEYS[0], 1, Limits.experts),
            "num_experts_per_tok": gguf.integer(EXPERT_KEYS[1], 1, Limits.experts),
            "shared_intermediate_size": gguf.integer(_GGUF_SHARED_SIZE, 1, Limits.width),
        }
    elif is_rotary and not gguf.has("logit_scale"):
        kv_heads = gguf.need("attention.head_count_kv")
        if isinstance(kv_heads, list):
            attention = [layer for layer, count in enumerate(kv_heads) if count]
        else:
            attention = list(range(gguf.integer("block_count", 1, Limits.layers)))
        values[GGUF_BAMBA] = attention
    if not is_rotary:
        # Whatever a file states of positions that no layer has.
        values["rope_scaling"] = {"rope_type": "default"}
    return values


def _write_gguf(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_gguf_mamba(config),
        _GGUF_ROTARY: any(layer.rotary for layer in config.layers),
    }


def _has_other_expansion(config: ModelConfig) -> bool:
    mamba = config.mamba2
    assert mamba is not None
    return mamba.inner_size != _GGUF_EXPANSION * config.hidden_size


def _limits_steps(config: ModelConfig) -> bool:
    assert config.mamba2 is not None
    return config.mamba2.step_limits != Mamba2Config.step_limits


GGUF_BAMBA: Final = "attn_layer_indices"
"""The key of config.json by which a GGUF file of Bamba is recognized."""
GRANITE_HYBRID_GGUF = GgufArchitecture(
    "granitehybrid",
    keys=(*EXPERT_KEYS, _GGUF_SHARED_SIZE, *GGUF_MULTIPLIERS, *GGUF_MAMBA),
    interleaved_rotary=True,
    biases=("qkv", "output"),
    partial_rotary=True,
    normalized=True,
    dense_too=True,
    uneven=True,
    layer_without_kv=LINEAR,
    read=_read_gguf,
    write=_write_gguf,
    refused={
        **GGUF_REFUSED,
        f"a width of Mamba other than {_GGUF_EXPANSION} hidden sizes": _has_other_expansion,
        "limits of step sizes": _limits_steps,
        "attention or Mamba in all layers": has_one_mixer,
    },
)

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
    gguf=GRANITE_HYBRID_GGUF,
)
