"""Configurations as transformers writes them."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from typing import Any

import oracle
from transformers import AutoConfig

GEMMA = {"head_dim": 16, "pad_token_id": 0}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.9, 4.5, 7.3],
}


_SCALED_QUERIES = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}


_MINISTRAL = {
    **_SCALED_QUERIES,
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": None}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-ends": ("llama", {"eos_token_id": [2, 5, 9], "bos_token_id": None}),
    "glm": ("glm", {"head_dim": 16}),
    "glm-whole": (
        "glm",
        {
            "head_dim": 16,
            "attention_bias": False,
            "rope_parameters": {"partial_rotary_factor": 1.0},
        },
    ),
    "glm-quarter": (
        "glm",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        },
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-whole": (
        "glm4",
        {
            "head_dim": 16,
            "attention_bias": False,
            "rope_parameters": {"partial_rotary_factor": 1.0},
        },
    ),
    "granite": ("granite", {}),
    "granite-multipliers": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 7.3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": _MINISTRAL}),
    "ministral3-window": ("ministral3", {"sliding_window": 7, "rope_parameters": _SCALED_QUERIES}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-default": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "eos_token_id": None}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-idle-window": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "smollm3-interval": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 5},
    ),
    "smollm3-no-theta": ("smollm3", {"rope_parameters": {"rope_type": "default"}}),
    "smollm3-types": (
        "smollm3",
        {
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 5,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-mha": ("phi3", {"num_key_value_heads": None, "sliding_window": 2047}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi3-longrope-factors": (
        "phi3",
        {
            "rope_parameters": {
                **_LONGROPE,
                "factor": 3.0,
                "attention_factor": 1.2,
                "partial_rotary_factor": 0.5,
            },
            "original_max_position_embeddings": 16,
            "hidden_size": 128,
        },
    ),
    "gemma": ("gemma", {**GEMMA}),
    "gemma-bias": (
        "gemma",
        {**GEMMA, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "gelu"},
    ),
    "gemma2": ("gemma2", {**GEMMA}),
    "gemma2-bare": (
        "gemma2",
        {
            **GEMMA,
            "sliding_window": 5,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2-types": (
        "gemma2",
        {**GEMMA, "layer_types": ["full_attention"] * 3, "attn_logit_softcapping": 7.0},
    ),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 8}),
    "gemma3-windows": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention"] * 3,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma3-whole": (
        "gemma3_text",
        {**GEMMA, "layer_types": ["full_attention"] * 3, "attention_bias": True},
    ),
    "gemma3-ropes": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["full_attention", *["sliding_attention"] * 2],
            "sliding_window": 5,
            "query_pre_attn_scalar": 9,
            "final_logit_softcapping": 7.0,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-mha": ("olmo2", {"num_key_value_heads": None, "tie_word_embeddings": True}),
    "olmo2-rope": (
        "olmo2",
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "olmo3": ("olmo3", {"num_hidden_layers": 9}),
    "olmo3-ropes": (
        "olmo3",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "rope_theta": 1e5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-layers": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "attention_factor": 1.1,
        "truncate": False,
    },
}


def transformers_config(kind: str, **changes: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoConfig.for_model(kind, **deepcopy({**oracle.SIZES, **changes}))


def config_keys(kind: str, **changes: Any) -> dict[str, Any]:
    """The config.json that transformers writes."""
    raw: dict[str, Any] = json.loads(
        transformers_config(kind, **changes).to_json_string(use_diff=False)
    )
    return raw
