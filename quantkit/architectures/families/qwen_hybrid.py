"""Qwen3-Next, and Qwen3.5, text, dense and with experts: gated delta rules between layers with
gated attention.

Its description is the code of transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantkit.architectures.config import GatedDeltaConfig, Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.families.qwen import QWEN2_MOE
from quantkit.architectures.rope import FULL
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError

# The name of a layer with a delta rule in config.json.
_LINEAR = "linear_attention"
# Every so many layers have attention, if a config does not list them; transformers' default.
_INTERVAL = 4
# How rotary positions of images are arranged; those of text have one number for all.
_FOR_IMAGES = ("mrope_section", "mrope_interleaved")
# Transformers' defaults, by the key in config.json.
_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _prepare(settings: Settings) -> Settings:
    """Drop rotary settings that do not concern text."""
    values = dict(settings.values)
    for key in ("rope_parameters", "rope_scaling"):
        rotary = values.get(key)
        if isinstance(rotary, dict):
            values[key] = {name: value for name, value in rotary.items() if name not in _FOR_IMAGES}
    return Settings(values, settings.path)


def _read_mixers(settings: Settings) -> dict[str, Any]:
    """Read the mixer of each layer, and the sizes of the delta rule."""
    count = keys.layer_count(settings)
    if settings.has("layer_types"):
        types = settings.strings("layer_types")
    else:
        interval = _INTERVAL
        if settings.has("full_attention_interval"):
            interval = settings.integer("full_attention_interval", 1, Limits.layers)
        types = []
        for layer in range(count):
            types.append(_LINEAR if (layer + 1) % interval else FULL)
    if len(types) != count or set(types) - {FULL, _LINEAR}:
        raise CheckpointError(
            "layer_types does not match the layers",
            path=settings.path,
            found=format_value(types),
            expected=f"{FULL} or {_LINEAR} for each of {count}",
        )
    sizes = {}
    for key, default in _SIZES.items():
        sizes[key] = settings.integer(key, 1, Limits.heads) if settings.has(key) else default
    delta = GatedDeltaConfig(
        key_heads=sizes["linear_num_key_heads"],
        value_heads=sizes["linear_num_value_heads"],
        key_dim=sizes["linear_key_head_dim"],
        value_dim=sizes["linear_value_head_dim"],
        convolution=sizes["linear_conv_kernel_dim"],
    )
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            "heads of values are not a multiple of those of keys",
            path=settings.path,
            found=f"{delta.value_heads} and {delta.key_heads}",
        )
    mixers = []
    for kind in types:
        mixers.append("gated_delta" if kind == _LINEAR else "attention")
    return {"mixers": mixers, "gated_delta": delta}


def _write_mixers(config: ModelConfig) -> dict[str, Any]:
    delta = config.gated_delta
    assert delta is not None
    types = []
    for layer in config.layers:
        types.append(FULL if layer.mixer == "attention" else _LINEAR)
    return {
        "layer_types": types,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.convolution,
    }


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (keys.ATTENTION_BIAS, Keys(_read_mixers, _write_mixers), keys.PARTIAL_ROTARY),
    options={
        "qk_norm": "head",
        "norm_offset": 1.0,
        # Of transformers, if the keys are absent.
        "head_dim": 256,
        "partial_rotary": 0.25,
        "attention_gate": True,
        "leading_rotary": True,
    },
    prepare=_prepare,
)


def _prepare_moe(settings: Settings) -> Settings:
    """Do the same; configs state no width of a dense feed-forward, which no layer has."""
    prepared = _prepare(settings)
    width = prepared.values.get("moe_intermediate_size")
    return Settings({**prepared.values, "intermediate_size": width}, settings.path)


QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    keys=(
        *QWEN3_5.keys,
        keys.experts(
            size_key="moe_intermediate_size",
            shared_key="shared_expert_intermediate_size",
            shared_gate=True,
        ),
    ),
    prepare=_prepare_moe,
    names=QWEN2_MOE.names,
)


def _read_joined_mixers(settings: Settings) -> dict[str, Any]:
    """Do as `_read_mixers`, for delta rules whose projections are joined key head by key head."""
    read = _read_mixers(settings)
    return {**read, "gated_delta": replace(read["gated_delta"], joined=True)}


QWEN3_NEXT = replace(
    QWEN3_5,
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    keys=(
        keys.ATTENTION_BIAS,
        Keys(_read_joined_mixers, _write_mixers),
        keys.PARTIAL_ROTARY,
        keys.experts(
            size_key="moe_intermediate_size",
            shared_key="shared_expert_intermediate_size",
            norm_key="norm_topk_prob",
            normalized=True,
            shared_gate=True,
        ),
        keys.SPARSE_LAYERS,
    ),
    # Unlike Qwen3.5, it reads no images.
    prepare=lambda settings: settings,
    names=QWEN2_MOE.names,
    prediction="mtp.",
    in_mlx=False,
)
