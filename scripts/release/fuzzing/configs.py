"""Random configs of every family that runs: sizes, features, and rotary settings in all the places
and spellings in which published files have them, some of them contradictory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VOCABULARY = 96
_ABSENT = object()
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NESTED = ("gemma3_text", "gemma4_text", "olmo3")  # whose rotary settings differ by kind of layer
_PARTIAL = (
    "glm",
    "glm4",
    "phi3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "bamba",
    "qwen3_next",
)  # which may rotate a part of a head
_DEFAULT_PART = {
    "qwen3_next": 0.25,
    "bamba": 0.5,
    "glm": 0.5,
    "glm4": 0.5,
    "qwen3_5_text": 0.25,
    "qwen3_5_moe_text": 0.25,
}
_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_FLAG = (_ABSENT, True, False)
_WINDOW = (_ABSENT, None, 5, 9)
_MIXTURE: dict[str, tuple[Any, ...]] = {
    "num_experts": (4, 6),
    "num_experts_per_tok": (1, 2),
    "norm_topk_prob": _FLAG,
}
_QWEN: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": _FLAG,
    "sliding_window": _WINDOW,
    "max_window_layers": (_ABSENT, 0, 1, 2),
}
_SPARSE: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (_ABSENT, 1, 2),
    "mlp_only_layers": (_ABSENT, [], [0]),
    "moe_intermediate_size": (24,),
}
_BIASES: dict[str, tuple[Any, ...]] = {"attention_bias": _FLAG, "mlp_bias": _FLAG}
_SOFTCAP = (_ABSENT, None, 7.0)
_GEMMA: dict[str, tuple[Any, ...]] = {
    "sliding_window": (_ABSENT, 5, 9),
    "query_pre_attn_scalar": (_ABSENT, 9, 16),
    "attention_bias": _FLAG,
    "final_logit_softcapping": _SOFTCAP,
    "attn_logit_softcapping": _SOFTCAP,
    "head_dim": (16,),
    "hidden_activation": (_ABSENT, "gelu_pytorch_tanh"),
    "hidden_act": (_ABSENT,),
}
_GLM: dict[str, tuple[Any, ...]] = {"head_dim": (8, 16), "attention_bias": _FLAG}
_CONVOLUTION: dict[str, tuple[Any, ...]] = {
    "norm_eps": (_ABSENT, 1e-5, 1e-3),
    "conv_L_cache": (_ABSENT, 1, 2, 3, 5),
    "conv_bias": _FLAG,
    "tie_embedding": (_ABSENT, _ABSENT, True, False),
    "head_dim": (_ABSENT, 16),
}
_DELTA: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 16),
    "attention_bias": _FLAG,
    "full_attention_interval": (_ABSENT, 1, 2, 3),
    "linear_num_key_heads": (1, 2),
    "linear_num_value_heads": (2, 4),
    "linear_key_head_dim": (8, 12),
    "linear_value_head_dim": (8, 16),
    "linear_conv_kernel_dim": (_ABSENT, 1, 2, 4),
}
_STEP_LIMITS = (
    _ABSENT,
    _ABSENT,
    [0.0, {"__float__": "Infinity"}],
    [0.3, {"__float__": "Infinity"}],
    [0.5, 0.9],
)
_MAMBA: dict[str, tuple[Any, ...]] = {
    "head_dim": (_ABSENT, 16),
    "mamba_n_heads": (2, 4),
    "mamba_n_groups": (_ABSENT, 1, 2),
    "mamba_d_head": (_ABSENT, "auto"),
    "mamba_d_state": (1, 4, 8),
    "mamba_d_conv": (_ABSENT, 1, 2, 4),
    "mamba_expand": (_ABSENT, 1, 2),
    "mamba_chunk_size": (_ABSENT, 4, 7),
    "mamba_conv_bias": (_ABSENT, None, True, False),
    "mamba_proj_bias": _FLAG,
    "time_step_limit": _STEP_LIMITS,
}
_MULTIPLIERS: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (_ABSENT, 12.0),
    "residual_multiplier": (_ABSENT, 0.22),
    "attention_multiplier": (_ABSENT, 0.3),
    "logits_scaling": (_ABSENT, 7.3),
}
FEATURES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {**_BIASES, "head_dim": (_ABSENT, None, 16)},
    "mistral": {"sliding_window": _WINDOW, "head_dim": (_ABSENT, 16)},
    "ministral3": {"sliding_window": _WINDOW, "head_dim": (8, 16)},
    "mixtral": {
        "sliding_window": _WINDOW,
        "num_local_experts": (4, 6),
        "num_experts_per_tok": (1, 2),
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": (8, 16), "attention_bias": _FLAG},
    "qwen2_moe": {
        **_QWEN,
        **_MIXTURE,
        **_SPARSE,
        "shared_expert_intermediate_size": (40,),
        "qkv_bias": _FLAG,
    },
    "qwen3_moe": {**_QWEN, **_MIXTURE, **_SPARSE, "head_dim": (8, 16), "attention_bias": _FLAG},
    "olmo2": {"attention_bias": _FLAG},
    "olmo3": {"attention_bias": _FLAG, "sliding_window": (_ABSENT, 5, 9)},
    "olmoe": {**_MIXTURE, "attention_bias": _FLAG, "clip_qkv": (_ABSENT, None, 0.5)},
    "smollm3": {
        **_BIASES,
        "no_rope_layers": (_ABSENT, [1, 0, 1, 1], [0, 0, 1, 0]),
        "no_rope_layer_interval": (_ABSENT, 2),
        "use_sliding_window": _FLAG,
        "sliding_window": _WINDOW,
    },
    "phi3": {"sliding_window": _WINDOW},
    "gemma": {
        "attention_bias": _FLAG,
        "head_dim": (16,),
        "hidden_activation": (_ABSENT, "gelu_pytorch_tanh"),
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
    },
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "sliding_window_pattern": (_ABSENT, 2, 3)},
    "gemma4_text": {
        "head_dim": (8, 16),
        "global_head_dim": (8, 16, 32),
        "num_global_key_value_heads": (_ABSENT, None, 1, 2),
        "attention_k_eq_v": _FLAG,
        "attention_bias": _FLAG,
        "sliding_window": (_ABSENT, 5, 9),
        "final_logit_softcapping": _SOFTCAP,
        "hidden_activation": (_ABSENT, "gelu_pytorch_tanh"),
        "hidden_act": (_ABSENT,),
        "hidden_size_per_layer_input": (0, 0, 8, 12),
        "vocab_size_per_layer_input": (VOCABULARY, VOCABULARY + 3),
        "num_kv_shared_layers": (_ABSENT, 0, 1, 2),
        "use_double_wide_mlp": _FLAG,
        "use_bidirectional_attention": (_ABSENT, None, "vision"),
        "enable_moe_block": _FLAG,
        "num_experts": (4, 6),
        "top_k_experts": (1, 2),
        "moe_intermediate_size": (24,),
    },
    "bamba": {
        **_MAMBA,
        **_BIASES,
        "attn_layer_indices": (_ABSENT, None, [], [0], [1, 3], [0, 2, 9]),
    },
    "granite": {**_BIASES, **_MULTIPLIERS},
    "granitemoehybrid": {
        **_MAMBA,
        **_MULTIPLIERS,
        "attention_bias": _FLAG,
        "num_local_experts": (0, 0, 4, 6),
        "num_experts_per_tok": (_ABSENT, 1, 2),
        "shared_intermediate_size": (16, 40),
        "position_embedding_type": (_ABSENT, None, "nope", "rope", "rope"),
    },
    "nemotron_h": {
        "head_dim": (8, 16),
        "attention_bias": _FLAG,
        "layer_norm_epsilon": (_ABSENT, 1e-5, 1e-3),
        "mlp_hidden_act": (_ABSENT, "relu2"),
        "mamba_hidden_act": (_ABSENT, "silu", "swish"),
        "mlp_bias": (_ABSENT, False, False, True),
        "use_bias": _FLAG,
        "use_conv_bias": _FLAG,
        "mamba_num_heads": (2, 4),
        "mamba_head_dim": (4, 8),
        "n_groups": (1, 2),
        "mamba_n_groups": (_ABSENT, _ABSENT, _ABSENT, 2),
        "ssm_state_size": (1, 4, 8),
        "conv_kernel": (_ABSENT, 1, 2, 4),
        "mamba_d_conv": (_ABSENT, _ABSENT, _ABSENT, 3),
        "chunk_size": (_ABSENT, 4, 7),
        "time_step_min": (_ABSENT, _ABSENT, 0.4),
        "time_step_limit": _STEP_LIMITS,
        "n_routed_experts": (4, 6),
        "num_experts_per_tok": (_ABSENT, 1, 2),
        "moe_intermediate_size": (24,),
        "moe_shared_expert_intermediate_size": (40,),
        "moe_latent_size": (_ABSENT, None, 12),
        "norm_topk_prob": _FLAG,
        "routed_scaling_factor": (_ABSENT, 1.0, 2.5),
        "residual_in_fp32": _FLAG,
        "sliding_window": (_ABSENT, None, 5),
    },
    "glm": _GLM,
    "glm4": _GLM,
    "gpt_oss": {
        "num_local_experts": (4,),
        "num_experts_per_tok": (1, 2),
        "head_dim": (8, 16),
        "sliding_window": (_ABSENT, 5),
        "attention_bias": _FLAG,
    },
    "exaone4": {
        "head_dim": (8, 16),
        "sliding_window": (_ABSENT, None, 5, 9),
        "sliding_window_pattern": (_ABSENT, 2, 3),
    },
    "cohere2": {
        "attention_bias": _FLAG,
        "head_dim": (_ABSENT, 16),
        "layer_norm_eps": (_ABSENT, 1e-5, 1e-3),
        "logit_scale": (_ABSENT, 0.25, 3.0),
        "sliding_window": (_ABSENT, 5, 9),
        "sliding_window_pattern": (_ABSENT, 2, 3),
    },
    "hunyuan_v1_dense": {"attention_bias": _FLAG, "head_dim": (8, 16)},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {
        **_DELTA,
        "num_experts": (4, 6),
        "num_experts_per_tok": (1, 2),
        "moe_intermediate_size": (24,),
        "shared_expert_intermediate_size": (40,),
    },
    "qwen3_next": {
        **_DELTA,
        **_MIXTURE,
        **_SPARSE,
        "shared_expert_intermediate_size": (40,),
    },
    "llama4_text": {
        "head_dim": (8, 16),
        "attention_bias": _FLAG,
        "attention_chunk_size": (_ABSENT, 3, 4, 8),
        "no_rope_layers": (_ABSENT, None, [], [1, 0, 1, 1], [0, 0, 1, 0]),
        "no_rope_layer_interval": (_ABSENT, 2),
        "attn_temperature_tuning": _FLAG,
        "floor_scale": (_ABSENT, 3, 8),
        "attn_scale": (_ABSENT, 0.5),
        "use_qk_norm": _FLAG,
        "intermediate_size_mlp": (40, 48),
        "num_local_experts": (4, 6),
        "num_experts_per_tok": (_ABSENT, 1, 2),
        "interleave_moe_layer_step": (_ABSENT, 1, 2),
        "moe_layers": (_ABSENT, None, [], [0], [1, 3]),
    },
    "lfm2": {
        **_CONVOLUTION,
        "full_attn_idxs": (_ABSENT, None, [], [0], [1, 3]),
        "block_ff_dim": (_ABSENT, _ABSENT, 20),
        "block_auto_adjust_ff_dim": _FLAG,
        "block_ffn_dim_multiplier": (_ABSENT, 1.3, 1),
        "block_multiple_of": (8, 12),
    },
    "lfm2_moe": {
        **_CONVOLUTION,
        **_MIXTURE,
        "moe_intermediate_size": (24,),
        "use_expert_bias": _FLAG,
        "routed_scaling_factor": (_ABSENT, 1.0, 2.5),
        "num_dense_layers": (0, 1, _ABSENT),
    },
}
"""Keys of each family beyond the sizes, with the values that are drawn."""
_LISTS_LAYERS = {
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "smollm3",
    "gpt_oss",
    "exaone4",
    "cohere2",
}


@dataclass(frozen=True)
class Trial:
    """One config.json, which the seed and its number determine."""

    number: int
    family: str
    raw: dict[str, Any]


def draw(seed: int, number: int) -> Trial:
    """The `number`-th config of a seed; families take turns."""
    rng = random.Random(f"{seed} {number}")
    family = sorted(FEATURES)[number % len(FEATURES)]
    heads = rng.choice((2, 4))
    raw: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads * rng.choice((1, 2)),
        "intermediate_size": rng.choice((24, 40)),
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((1, 2, heads)),
        "max_position_embeddings": rng.choice((12, 20, 48)),
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": rng.choice(("silu", "silu", "swish")),
        "tie_word_embeddings": rng.choice(_FLAG),
    }
    raw |= {key: rng.choice(values) for key, values in FEATURES[family].items()}
    if family in _LISTS_LAYERS and rng.random() < (0.85 if family in _NESTED else 0.5):
        kinds = rng.choice(((_FULL, _SLIDING), (_FULL, _SLIDING), (_FULL,), (_SLIDING,)))
        raw["layer_types"] = [rng.choice(kinds) for _ in range(raw["num_hidden_layers"])]
    # Files of the mixture always list their layers.
    if family == "lfm2_moe" or (family == "lfm2" and rng.random() < 0.7):
        raw["layer_types"] = [rng.choice((_FULL, "conv")) for _ in range(raw["num_hidden_layers"])]
    if family == "llama4_text" and rng.random() < 0.3:
        kinds = (_FULL, "chunked_attention")
        raw["layer_types"] = [rng.choice(kinds) for _ in range(raw["num_hidden_layers"])]
    elif family == "llama4_text" and isinstance(raw["no_rope_layers"], list):
        # A type is listed for each entry.
        raw["no_rope_layers"] = raw["no_rope_layers"][: raw["num_hidden_layers"]]
    if family.startswith(("qwen3_5", "qwen3_next")) and rng.random() < 0.6:
        kinds = (_FULL, "linear_attention")
        raw["layer_types"] = [rng.choice(kinds) for _ in range(raw["num_hidden_layers"])]
    if family == "granitemoehybrid" and rng.random() < 0.8:
        names = rng.choice(((_FULL, "linear_attention"), ("attention", "mamba")))
        key = rng.choice(("layer_types", "layer_types", "layers_block_type"))
        raw[key] = [rng.choice(names) for _ in range(raw["num_hidden_layers"])]
    if family == "nemotron_h":
        raw |= _draw_branches(rng, raw["num_hidden_layers"])
    head_dim = raw.get("head_dim")
    if not isinstance(head_dim, int):
        head_dim = raw["hidden_size"] // heads
    if family != "nemotron_h":  # which has no rotary positions
        raw |= _rotary(rng, family, head_dim, raw["max_position_embeddings"])
    return Trial(number, family, {key: value for key, value in raw.items() if value is not _ABSENT})


def draw_runnable(seed: int, number: int, family: str) -> dict[str, Any]:
    """The `number`-th config of a seed of one family, with rotary settings that both libraries
    understand, and room for 12 tokens without a change of the rotary positions.
    """
    families = sorted(FEATURES)
    raw = draw(seed, number * len(families) + families.index(family)).raw
    for key in ("rope_parameters", "rope_scaling", "original_max_position_embeddings"):
        raw.pop(key, None)
    # transformers divides by 0 if such a config does not list its layers.
    if family == "exaone4" and raw.get("sliding_window", 1) is None:
        raw["layer_types"] = [_FULL] * raw["num_hidden_layers"]
    rng = random.Random(f"{seed} {number} {family}")
    if family == "gemma4_text":
        raw["num_kv_shared_layers"] = _count_shared_layers(raw)
        raw["rope_parameters"] = {
            _FULL: rng.choice(
                (
                    {"rope_type": "default", "rope_theta": 500.0},
                    {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                    {
                        "rope_type": "proportional",
                        "rope_theta": 500.0,
                        "partial_rotary_factor": 0.8,
                        "factor": 2.0,
                    },
                )
            ),
            _SLIDING: {"rope_type": "default", "rope_theta": rng.choice((500.0, 1e4))},
        }
        if rng.random() < 0.2:
            del raw["rope_parameters"]
    elif rng.random() < 0.3:
        raw["rope_parameters"] = {
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": raw.get("rope_theta", 1e4),
        }
    elif family == "hunyuan_v1_dense" and rng.random() < 0.5:
        raw["rope_scaling"] = {"type": "dynamic", "factor": 2.0, "alpha": rng.choice((1.5, 50))}
    return raw


def _draw_branches(rng: random.Random, count: int) -> dict[str, Any]:
    """The only branch of each layer of Nemotron H, in one of its spellings."""
    letters = "".join(rng.choice("MMM*-E") for _ in range(count + rng.choice((0, 0, 2))))
    # quantkit refuses biases of experts.
    found: dict[str, Any] = {"mlp_bias": False} if "E" in letters else {}
    if rng.random() < 0.4:
        return {**found, "hybrid_override_pattern": letters}
    older = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    newer = {**older, "M": "linear_attention", "*": _FULL}
    names = rng.choice((older, newer))
    key = rng.choice(("layers_block_type", "layers_block_type", "layer_types"))
    return {**found, key: [names[letter] for letter in letters]}


def _count_shared_layers(raw: dict[str, Any]) -> int:
    """How many of the last layers of a Gemma 4 may share keys and values, at most as many as drawn:
    one layer of each kind before them computes some.
    """
    count = raw["num_hidden_layers"]
    wanted = raw.get("num_kv_shared_layers", 0)
    # transformers shares none without embeddings for each layer.
    if not raw["hidden_size_per_layer_input"]:
        return 0
    # The last layer has no window.
    kinds = [*raw.get("layer_types", [_SLIDING] * count)[:-1], _FULL]
    while set(kinds[: count - wanted]) != set(kinds):
        wanted -= 1
    return wanted


def _rotary(rng: random.Random, family: str, head_dim: int, context: int) -> dict[str, Any]:
    """All keys that say something of rotary positions."""
    partial = rng.choice((_ABSENT, 0.5, 1.0)) if family in _PARTIAL else _ABSENT
    dim = int(head_dim * (partial if isinstance(partial, float) else _DEFAULT_PART.get(family, 1)))

    def scaling() -> dict[str, Any]:
        return _scaling(rng, family, dim // 2, context)

    found: dict[str, Any] = {"rope_theta": rng.choice((_ABSENT, 1e4, 5e5, 70.0))}
    if rng.random() < 0.25:
        found["original_max_position_embeddings"] = rng.choice((8, 12, context))
    if family in _NESTED:
        return found | _nested(rng, scaling)
    if partial is not _ABSENT and rng.random() < 0.5:
        found["partial_rotary_factor"], partial = partial, _ABSENT
    place = rng.choice(
        ("rope_parameters", "rope_parameters", "rope_scaling", "rope_scaling", "both", "none")
    )
    for key in ("rope_parameters", "rope_scaling"):
        if place in (key, "both"):
            found[key] = scaling()
            if partial is not _ABSENT:
                found[key]["partial_rotary_factor"] = partial
        elif rng.random() < 0.2:
            found[key] = rng.choice((None, {}))
    return found


def _nested(rng: random.Random, scaling: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Rotary settings by kind of layer, or the older keys, or both."""
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        found["rope_local_base_freq"] = rng.choice((1e4, 300.0))
    if rng.random() < 0.5:
        kinds = rng.choice(((_FULL, _SLIDING), (_FULL, _SLIDING), (_FULL,), (_SLIDING,)))
        found["rope_parameters"] = {kind: scaling() for kind in kinds}
        if rng.random() < 0.1:
            found["rope_parameters"][rng.choice(kinds)] = None
        if rng.random() < 0.1:
            found["rope_parameters"]["truncate"] = False
    if rng.random() < 0.5:
        found["rope_scaling"] = rng.choice((scaling(), scaling(), None))
    return found


def _scaling(rng: random.Random, family: str, pairs: int, context: int) -> dict[str, Any]:
    kind = rng.choice(
        ("default", "longrope", "longrope") if family == "phi3" and rng.random() < 0.8 else _TYPES
    )
    found: dict[str, Any] = {}
    if kind in ("linear", "dynamic", "yarn", "llama3") or (
        kind == "longrope" and rng.random() < 0.4
    ):
        found["factor"] = rng.choice((2.0, 4.0, 8))
    if kind in ("yarn", "llama3", "longrope") and rng.random() < 0.7:
        found["original_max_position_embeddings"] = rng.choice((6, 10, context))
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice((2.0, 4.0))}
    if kind == "longrope":
        found |= {
            name: [1 + low * i for i in range(pairs)]
            for name, low in (("short_factor", 0.1), ("long_factor", 1.0))
        }
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        found["attention_factor"] = rng.choice((1.3, None))
    if kind == "yarn":
        options = {
            "beta_fast": (4.0, 32),
            "beta_slow": (0.5, 1),
            "mscale": (0.7, 1.0),
            "mscale_all_dim": (1.2, 0.0),
            "truncate": (True, False, None),
        }
        found |= {key: rng.choice(values) for key, values in options.items() if rng.random() < 0.4}
    if family == "hunyuan_v1_dense" and kind == "dynamic" and rng.random() < 0.7:
        found["alpha"] = rng.choice((None, 0, 1.5, 50))
    if family == "ministral3" and rng.random() < 0.5:
        found["llama_4_scaling_beta"] = 0.3
    if rng.random() < 0.5:
        found["rope_theta"] = rng.choice((1e4, 5e5, 70.0))
    spelling = rng.choice((*("rope_type",) * 4, *("type",) * 3, "both", "contradiction", "none"))
    if spelling in ("type", "both"):
        found["type"] = "su" if kind == "longrope" and rng.random() < 0.3 else kind
    if spelling in ("rope_type", "both", "contradiction"):
        found["rope_type"] = kind
    if spelling == "contradiction":
        found["type"] = rng.choice(_TYPES)
    return dict(rng.sample(sorted(found.items()), len(found)))
