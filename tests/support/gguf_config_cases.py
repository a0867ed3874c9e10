"""Configurations and the GGUF metadata that llama.cpp writes for them."""

from __future__ import annotations

from typing import Any

from config_cases import VARIANTS

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_parameters": {**YARN, "truncate": False},
}


# As published: equal factors, between which nothing is blended.
LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LFM2_MOE = {
    **EXPERTS,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "tie_word_embeddings": True,
}
LLAMA4 = {
    "head_dim": 16,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 5,
    "num_local_experts": 4,
}

MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
GRANITE_HYBRID = {
    **MAMBA,
    "layer_types": HYBRID,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
}
GRANITE_HYBRID_MOE = {
    **GRANITE_HYBRID,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
    "attention_bias": True,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.7,
}
BAMBA = {**MAMBA, "attn_layer_indices": [1]}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "mlp_bias": True,
}
NEMOTRON_H_MOE = {
    **NEMOTRON_H,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "mlp_bias": False,
    "time_step_min": 0.01,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": 32,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "pad_token_id": 0,
}
GEMMA4_SMALL = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
GEMMA4_EXPERTS = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: VARIANTS[name]
        for name in (
            "llama",
            "llama-biases",
            "llama-head-dim",
            "llama-ends",
            "granite",
            "granite-multipliers",
            "mistral-window",
            "mistral-no-window",
            "qwen2",
            "qwen2-tied",
            "qwen2-window",
            "qwen3",
            "smollm3-no-theta",
            "phi3",
            "phi3-mha",
            "phi3-partial",
            "phi3-longrope",
            "gemma",
            "olmo2",
            "olmo3",
            "glm4",
            "glm4-whole",
            "ministral3",
            "ministral3-window",
        )
    },
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "pad_token_id": 0, "sliding_window": 7},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "pad_token_id": 0, "num_hidden_layers": 8},
    ),
    "gemma3-linear": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "pad_token_id": 0,
            "num_hidden_layers": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm": ("glm", {"head_dim": 8}),
    "glm4-bare": ("glm4", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True}),
    "ministral3-yarn": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss-rounded": (
        "gpt_oss",
        {
            **GPT_OSS,
            "rope_parameters": {**YARN, "truncate": True, "beta_fast": 32.0},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gpt-oss-default": ("gpt_oss", {**GPT_OSS, "rope_parameters": {"rope_theta": 150000.0}}),
    "cohere2": ("cohere2", {"pad_token_id": 0, "num_hidden_layers": 5, "logit_scale": 0.7}),
    "cohere2-pattern": (
        "cohere2",
        {
            "pad_token_id": 0,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "layer_norm_eps": 1e-3,
        },
    ),
    "exaone4": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 8},
    ),
    "exaone4-windows": ("exaone4", {"sliding_window": 5, "num_hidden_layers": 64}),
    "hunyuan-dense": ("hunyuan_v1_dense", {"head_dim": 16, "pad_token_id": 0}),
    "hunyuan-dense-alpha": (
        "hunyuan_v1_dense",
        {
            "head_dim": 16,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-moe": ("lfm2_moe", LFM2_MOE),
    "qwen3-5": ("qwen3_5_text", DELTA),
    "qwen3-5-published": (
        "qwen3_5_text",
        {
            **DELTA,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-next": (
        "qwen3_next",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-next-yarn": (
        "qwen3_next",
        {
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        },
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "granite-hybrid-moe": ("granitemoehybrid", GRANITE_HYBRID_MOE),
    "bamba": ("bamba", BAMBA),
    "bamba-biases": (
        "bamba",
        {
            **BAMBA,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "nemotron-h": ("nemotron_h", NEMOTRON_H),
    "nemotron-h-moe": ("nemotron_h", NEMOTRON_H_MOE),
    "gemma4": ("gemma4_text", {**GEMMA4, "tie_word_embeddings": False}),
    "gemma4-small": ("gemma4_text", GEMMA4_SMALL),
    "gemma4-experts": ("gemma4_text", GEMMA4_EXPERTS),
    "llama4": ("llama4_text", LLAMA4),
    "llama4-scout": ("llama4_text", {**LLAMA4, "rope_parameters": LLAMA4_ROPE}),
    "llama4-steps": (
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 8}),
}
