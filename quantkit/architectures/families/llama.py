"""Llama, and the families that differ from it in a few features: Mistral's, Granite, SmolLM3,
Phi-3, GLM-4, OLMo.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import (
    EXPERT_KEYS,
    QUERY_SCALE,
    WINDOWED_BASE,
    YARN_BETAS,
    YARN_LOG_MULTIPLIER,
    Family,
    GgufArchitecture,
    with_default_rope,
)
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.names import BLOCK, CANONICAL
from quantkit.architectures.rope import FULL, MAX_THETA, MIN_THETA, SLIDING
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import CheckpointError, UnsupportedError

_ALL_BIASES = ("qkv", "output", "mlp")

# Llama 1 to 3.x and CodeLlama (2302.13971, 2307.09288, 2407.21783).
_LLAMA_GGUF = GgufArchitecture(
    "llama",
    # Mixtral's experts have the width of the feed-forward, so files do not state it separately.
    keys=EXPERT_KEYS[:2],
    interleaved_rotary=True,
    biases=_ALL_BIASES,
    rope_freqs=True,
    long_rope=True,
    normalized=True,
    dense_too=True,
)
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (keys.ATTENTION_BIAS, keys.MLP_BIAS),
    options={"kv_heads_required": False},
    gguf=_LLAMA_GGUF,
)

# Mistral (2310.06825): a sliding window in every layer.
_EVERY_WINDOW = keys.one_window(keys.DEFAULT_WINDOW)


def _mistral_windows(settings: Settings) -> dict[str, Any]:
    values = _EVERY_WINDOW.read(settings)
    types = keys.layer_types(settings, keys.layer_count(settings))
    # transformers' Mistral gives all layers the same window, whatever the file lists.
    if FULL in types and values["windows"][0] is not None:
        raise UnsupportedError(
            "mixed attention layers in a Mistral model are not supported", path=settings.path
        )
    return values


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (Keys(_mistral_windows, _EVERY_WINDOW.write),),
    gguf=_LLAMA_GGUF,
    gguf_mark="sliding_window",
)

# Ministral 3 (Mistral AI): Mistral with YaRN, and queries scaled by their positions, as in Llama 4.
# The published models also have a vision tower, and the name ``mistral3``.
# The defaults are those of transformers, if a config has no rotary settings.
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    (keys.one_window(None),),
    options={"head_dim": 128, "query_scaling": True},
    prepare=lambda settings: with_default_rope(settings, _MINISTRAL_ROPE),
    gguf=GgufArchitecture(
        "mistral3",
        keys=(*YARN_BETAS, YARN_LOG_MULTIPLIER, QUERY_SCALE),
        interleaved_rotary=True,
    ),
)

# Mixtral (2401.04088): Mistral whose feed-forward is a mixture of experts, each with its own
# tensors on disk.
_MOE = BLOCK + "block_sparse_moe."
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (keys.one_window(None), keys.experts("num_local_experts")),
    options={"default_theta": 1e6},
    names={
        "router": _MOE + "gate",
        "expert.gate": _MOE + "experts.{expert}.w1",
        "expert.up": _MOE + "experts.{expert}.w3",
        "expert.down": _MOE + "experts.{expert}.w2",
    },
    gguf=_LLAMA_GGUF,
    gguf_mark="num_experts",
)

# Granite 3 (IBM): four multipliers: of embeddings, residual branches, attention scores and logits.
# Far beyond what is published.
_BOUNDS = (1e-6, 1e6)
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_scale",
    "logits_scaling": "logit_multiplier",
}
GGUF_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Granite's multipliers: llama.cpp's key, and that of config.json."""


def _read_granite(gguf: Settings, head_dim: int) -> dict[str, Any]:
    # In llama.cpp a model without rotary positions.
    if not gguf.flag("rope.scaling.finetuned", True):
        raise UnsupportedError(
            "a model without rotary positions is not supported",
            path=gguf.path,
            found="'rope.scaling.finetuned' false",
        )
    gguf.need("logit_scale")
    return read_gguf_multipliers(gguf, head_dim)


def read_gguf_multipliers(gguf: Settings, head_dim: int) -> dict[str, Any]:
    """Read the multipliers of Granite from the keys `GGUF_MULTIPLIERS` of a GGUF file."""
    values = {name: keys.optional_number(gguf, key) for key, name in GGUF_MULTIPLIERS.items()}
    # Without a factor llama.cpp scales attention in the usual way; the default of config.json is 1.
    if values["attention_multiplier"] is None:
        values["attention_multiplier"] = head_dim**-0.5
    return values


def declare_granite_multipliers() -> list[Keys]:
    """Declare the multipliers of Granite."""
    declared = []
    for key, field in _MULTIPLIERS.items():
        # config.json states what logits are divided by, the decoder multiplies.
        inverse = key == "logits_scaling"
        declared.append(keys.number(key, field, *_BOUNDS, 1.0, null=1.0, inverse=inverse))
    return declared


GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    (
        keys.ATTENTION_BIAS,
        keys.MLP_BIAS,
        *declare_granite_multipliers(),
    ),
    options={"kv_heads_required": False},
    gguf=GgufArchitecture(
        "granite",
        keys=tuple(GGUF_MULTIPLIERS),
        interleaved_rotary=True,
        biases=_ALL_BIASES,
        rope_freqs=True,
        long_rope=True,
        read=_read_granite,
    ),
)

# SmolLM3: layers without rotary positions (2501.18795), every fourth unless the config lists them.
_INTERVAL = 4


def _smollm_windows(settings: Settings) -> list[int | None]:
    count = keys.layer_count(settings)
    enabled = settings.flag("use_sliding_window", False)
    windowed = [kind == SLIDING for kind in keys.layer_types(settings, count)]
    window = keys.sliding_window(settings, None)
    # If the file lists the layers, the flag has no effect, as in transformers.
    if not windowed:
        for rotated in _rotary(settings, count):
            windowed.append(enabled and window is not None and not rotated)
    return keys.windows_of(settings, windowed, window)


def _rotary(settings: Settings, count: int) -> list[bool]:
    """Read whether each layer has rotary positions: 1 in ``no_rope_layers``, in spite of its
    name.
    """
    key = "no_rope_layers"
    if not settings.has(key):
        interval_key = "no_rope_layer_interval"
        if settings.has(interval_key):
            interval = settings.integer(interval_key, 1, Limits.layers)
        else:
            interval = _INTERVAL
        return [(layer + 1) % interval != 0 for layer in range(count)]
    listed = settings.need(key)
    # A longer list is valid: transformers reads it by the number of a layer.
    if not _is_list_of_bits(listed) or len(listed) < count:
        raise CheckpointError(
            f"{key} does not match the layers",
            path=settings.path,
            found=format_value(listed),
            expected=f"0 or 1 for each of {count}",
        )
    return [rotated == 1 for rotated in listed[:count]]


def _is_list_of_bits(value: Any) -> bool:
    # A boolean equals 0 or 1, but is not a number in JSON.
    return isinstance(value, list) and all(type(bit) is int and bit in (0, 1) for bit in value)


_ROTARY = Keys(
    lambda settings: {"rotary": _rotary(settings, keys.layer_count(settings))},
    lambda config: {"no_rope_layers": [int(layer.rotary) for layer in config.layers]},
)
_SMOLLM_WINDOWS = keys.make_switched_window_keys(
    _smollm_windows, lambda config: {"layer_types": keys.write_layer_types(config)}
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    (keys.ATTENTION_BIAS, keys.MLP_BIAS, _ROTARY, _SMOLLM_WINDOWS),
    options={"tied_by_default": True, "default_theta": 2e6},
    gguf=GgufArchitecture(
        "smollm3",
        interleaved_rotary=True,
        # llama.cpp has no key for it.
        read=lambda gguf, head_dim: {"no_rope_layer_interval": _INTERVAL},
    ),
)

# Phi-3, 3.5 and 4 (2404.14219): fused projections on disk: one tensor for q, k, v, one for gate and
# up.
_CONTEXT = "original_max_position_embeddings"
# Of transformers, whatever the scaling itself states.
_PHI_DEFAULTS = {_CONTEXT: 4096}
# Of LongRoPE in this family's first configs; another is "su".
_OLD_NAME = "yarn"
_FUSED = ("attention.qkv", "mlp.gate_up")


def _rename_old_types(settings: Settings) -> Settings:
    values: dict[str, Any] = dict(_PHI_DEFAULTS)
    for key, value in settings.values.items():
        if value is not None:
            values[key] = value
    for key in ("rope_scaling", "rope_parameters"):
        scaling = values.get(key)
        if not isinstance(scaling, dict):
            continue
        renamed = dict(scaling)
        for type_key in ("type", "rope_type"):
            if renamed.get(type_key) == _OLD_NAME:
                renamed[type_key] = "longrope"
        values[key] = renamed
    return Settings(values, settings.path)


def _write_phi(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    if rope.type != "longrope":
        return {}
    if not (rope.short_factor and rope.long_factor and rope.original_context):
        return {}
    # Older readers accept only these three keys.
    scaling: dict[str, Any] = {
        "type": rope.type,
        "short_factor": [*rope.short_factor],
        "long_factor": [*rope.long_factor],
    }
    if rope.factor != config.max_context / rope.original_context:
        scaling["factor"] = rope.factor
    if rope.attention_factor is not None:
        scaling["attention_factor"] = rope.attention_factor
    return {_CONTEXT: rope.original_context, "rope_scaling": scaling}


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    (keys.one_window(None), Keys(write=_write_phi)),
    options={
        "kv_heads_required": False,
        "partial_rotary": 1.0,
        "rope_types": ("default", "longrope"),
    },
    prepare=_rename_old_types,
    fused={role: CANONICAL[role] for role in _FUSED},
    gguf=GgufArchitecture(
        "phi3", fused=_FUSED, long_rope=True, partial_rotary=True, full_width=True
    ),
)

# GLM-4 of 2024 (2406.12793): biases of queries, keys and values; half of each head is rotated, in
# adjacent pairs. GLM-4 of 2025 (0414) also has norms after attention and feed-forward.
_GLM_GGUF = GgufArchitecture(
    "chatglm",
    interleaved_rotary=True,
    fused=("mlp.gate_up",),
    biases=("qkv",),
    partial_rotary=True,
    full_width=True,
)
GLM = Family(
    "glm",
    "GlmForCausalLM",
    (keys.flag("attention_bias", "qkv_bias", default=True), keys.PARTIAL_ROTARY),
    # Of transformers, if the keys are absent.
    options={"head_dim": 128, "partial_rotary": 0.5},
    fused={"mlp.gate_up": CANONICAL["mlp.gate_up"]},
    interleaved_rotary=True,
    gguf=_GLM_GGUF,
)
GLM4 = replace(
    GLM,
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    options={**GLM.options, "norms": "both"},
    names={
        "attention.output_norm": BLOCK + "post_self_attn_layernorm",
        "mlp.output_norm": BLOCK + "post_mlp_layernorm",
    },
    gguf=replace(_GLM_GGUF, name="glm4", full_width=False),
)

# OLMo 2 (2501.00656): norms after attention and feed-forward, and of queries and keys over all
# heads.
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    (keys.ATTENTION_BIAS,),
    options={"kv_heads_required": False, "norms": "after", "qk_norm": "width"},
    names={
        "attention.output_norm": BLOCK + "post_attention_layernorm",
        "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
    },
    gguf=GgufArchitecture(
        "olmo2",
        keys=(WINDOWED_BASE,),
        window_period=4,
        tied=False,
        full_width=True,
        one_rotary_base=True,
    ),
)

# OLMo 3 (2512.13961): OLMo 2 with windows in three of four layers, whose rotary positions are not
# scaled.
_OLMO_THETA = 500000.0
_OLMO_WINDOWS = keys.windows_by_kind(4)


def _olmo_windows(settings: Settings) -> dict[str, Any]:
    """Read the windows of layers; raises `UnsupportedError` for a rotary base that some readers
    use for all layers, and transformers for those without a window.
    """
    values = _OLMO_WINDOWS.read(settings)
    if settings.has("rope_parameters"):
        kinds = settings.inside("rope_parameters")
    else:
        kinds = settings
    has_window_base = kinds.has(SLIDING) and kinds.inside(SLIDING).has("rope_theta")
    has_windows = any(values["windows"])
    ambiguous = has_windows and settings.has("rope_theta") and not has_window_base
    if ambiguous and settings.number("rope_theta", MIN_THETA, MAX_THETA) != _OLMO_THETA:
        raise UnsupportedError(
            "readers disagree on the rotary base of sliding-window layers",
            path=settings.path,
            found=f"rope_theta {settings.values['rope_theta']}",
            expected="rope_parameters for each layer type",
        )
    return values


OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    keys=(*OLMO2.keys, keys.LAYER_ROPES, Keys(_olmo_windows, _OLMO_WINDOWS.write)),
    options={
        **OLMO2.options,
        "default_theta": _OLMO_THETA,
        "windowed_theta": ("rope_theta", _OLMO_THETA),
    },
    gguf_mark="sliding_window",
)

# OLMoE (2409.02060): many small experts, norms over all queries and all keys of a token, clipped
# projections.
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    (
        keys.ATTENTION_BIAS,
        keys.number("clip_qkv", "clip_qkv", 1e-6, 1e6, None, null=None),
        keys.experts(norm_key="norm_topk_prob"),
    ),
    options={"kv_heads_required": False, "qk_norm": "width"},
    gguf=GgufArchitecture(
        "olmoe",
        keys=EXPERT_KEYS[:2],
        normalized=False,
        tied=False,
        full_width=True,
        refused={
            "fewer KV heads than heads": lambda config: config.num_kv_heads != config.num_heads
        },
    ),
)
