"""Tiny configurations of every architecture that has a decoder here."""

from __future__ import annotations

from typing import Any

ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
}


_GLM = {"head_dim": 16, "pad_token_id": 0}


_SCALED_QUERIES = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 12,
    "llama_4_scaling_beta": 0.5,
}


_MINISTRAL = {
    "head_dim": 16,
    "pad_token_id": 0,
    "rope_parameters": {
        **ROPES["yarn"],
        **_SCALED_QUERIES,
        "rope_type": "yarn",
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


_PHI = {"pad_token_id": 0}


_LONGROPE = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 26,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.5, 2.9, 4.5, 7.3],
    },
}


_GEMMA = {"head_dim": 16, "pad_token_id": 0}


_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


_LLAMA4 = {
    "head_dim": 16,
    "attention_chunk_size": 7,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 6,
}


_COHERE = {"pad_token_id": 0, "sliding_window": 7, "logit_scale": 1.5}


_HUNYUAN = {"head_dim": 16, "pad_token_id": 0}


_MOE = {"num_experts": 6, "num_experts_per_tok": 2}


_MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2}


_QWEN2_MOE = {**_MOE, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}


_QWEN3_MOE = {**_MOE, "moe_intermediate_size": 48, "head_dim": 16}


_OLMOE = {**_MOE, "num_key_value_heads": 8}


_LFM2_MOE = {
    **_MOE,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "moe_intermediate_size": 48,
}


_QWEN3_5 = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}
_BAMBA = {**_MAMBA, "attn_layer_indices": [1]}
_GRANITE_HYBRID = {
    **_MAMBA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 80,
    "attention_multiplier": 0.3,
}


_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 12,
}
_NEMOTRON_H_MOE = {
    **_NEMOTRON_H,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
}


_GPT_OSS = {**_MIXTRAL, "head_dim": 16, "sliding_window": 5}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    "llama-odd-groups": (
        "llama",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 16}),
    "glm-whole": (
        "glm",
        {**_GLM, "rope_parameters": {"partial_rotary_factor": 1.0}, "tie_word_embeddings": True},
    ),
    "glm-bare": ("glm", {**_GLM, "attention_bias": False}),
    "glm": ("glm", _GLM),
    "glm4-whole": (
        "glm4",
        {**_GLM, "rope_parameters": {"partial_rotary_factor": 1.0}, "tie_word_embeddings": True},
    ),
    "glm4-bare": ("glm4", {**_GLM, "attention_bias": False}),
    "glm4": ("glm4", _GLM),
    "granite": ("granite", {}),
    "granite-multipliers": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.7,
            "logits_scaling": 0.3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": ("ministral3", {**_MINISTRAL, "tie_word_embeddings": True}),
    "ministral3-default": ("ministral3", {**_MINISTRAL, "rope_parameters": _SCALED_QUERIES}),
    "ministral3-window": ("ministral3", {**_MINISTRAL, "sliding_window": 7}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5},
    ),
    "phi3": ("phi3", _PHI),
    "phi3-window": ("phi3", {**_PHI, "sliding_window": 7, "tie_word_embeddings": True}),
    "phi3-partial": ("phi3", {**_PHI, "partial_rotary_factor": 0.5}),
    "phi3-longrope": ("phi3", {**_PHI, **_LONGROPE}),
    "phi3-longrope-partial-window": (
        "phi3",
        {
            **_PHI,
            **_LONGROPE,
            "partial_rotary_factor": 0.5,
            "hidden_size": 128,
            "sliding_window": 7,
        },
    ),
    "gemma": ("gemma", _GEMMA),
    "gemma-bias": ("gemma", {**_GEMMA, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", {**_GEMMA, "sliding_window": 7}),
    "gemma2-bare": (
        "gemma2",
        {
            **_GEMMA,
            "layer_types": ["full_attention"] * 3,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma2-features": (
        "gemma2",
        {
            **_GEMMA,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("gemma3_text", {**_GEMMA, "sliding_window": 7, "num_hidden_layers": 7}),
    "gemma3-features": (
        "gemma3_text",
        {
            **_GEMMA,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "final_logit_softcapping": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma4": ("gemma4_text", _GEMMA4),
    "gemma4-small": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 100,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-features": (
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_bias": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 4,
            "final_logit_softcapping": 1.5,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "llama4": ("llama4_text", {**_LLAMA4, "num_hidden_layers": 4}),
    "llama4-features": (
        "llama4_text",
        {
            **_LLAMA4,
            "attention_bias": True,
            "attention_chunk_size": 5,
            "attn_scale": 0.5,
            "floor_scale": 6,
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [0, 2],
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
            "rope_parameters": dict(ROPES["llama3"]),
        },
    ),
    "llama4-bare": (
        "llama4_text",
        {
            **_LLAMA4,
            "attn_temperature_tuning": False,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
        },
    ),
    "cohere2": ("cohere2", {**_COHERE, "num_hidden_layers": 4}),
    "cohere2-features": (
        "cohere2",
        {
            **_COHERE,
            "attention_bias": True,
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "logit_scale": 0.7,
            "tie_word_embeddings": False,
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 7, "num_hidden_layers": 4, "head_dim": 16}),
    "exaone4-full": (
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
            "rope_parameters": dict(ROPES["llama3"]),
        },
    ),
    "exaone4-features": (
        "exaone4",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": dict(ROPES["llama3"]),
        },
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", _HUNYUAN),
    "hunyuan-dense-features": (
        "hunyuan_v1_dense",
        {
            **_HUNYUAN,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 30.0,
                "factor": 1.0,
                "rope_theta": 500.0,
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-mha": ("olmo2", {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "olmo2-bias": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 7, "num_hidden_layers": 4}),
    "olmo3-features": (
        "olmo3",
        {
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "rope_theta": 5e5,
                    "attention_factor": 1.1,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "lfm2-attention": ("lfm2", {"block_multiple_of": 8}),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": ("lfm2_moe", _LFM2_MOE),
    "lfm2-moe-scaled": (
        "lfm2_moe",
        {
            **_LFM2_MOE,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "use_expert_bias": False,
        },
    ),
    "qwen3-5": ("qwen3_5_text", _QWEN3_5),
    "qwen3-5-features": (
        "qwen3_5_text",
        {
            **_QWEN3_5,
            "attention_bias": True,
            "linear_conv_kernel_dim": 2,
            "linear_value_head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        {
            **_QWEN3_5,
            **_MOE,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "bamba": ("bamba", _BAMBA),
    "bamba-features": (
        "bamba",
        {
            **_BAMBA,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_expand": 1,
            "time_step_limit": [0.3, 1.2],
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.25,
            },
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": ("nemotron_h", _NEMOTRON_H),
    "nemotron-h-features": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "time_step_min": 0.6,
            "layer_norm_epsilon": 1e-3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h-moe": ("nemotron_h", _NEMOTRON_H_MOE),
    "nemotron-h-moe-latent": (
        "nemotron_h",
        {
            **_NEMOTRON_H_MOE,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
        },
    ),
    "granitemoehybrid": ("granitemoehybrid", {**_GRANITE_HYBRID, "num_local_experts": 0}),
    "granitemoehybrid-features": (
        "granitemoehybrid",
        {
            **_GRANITE_HYBRID,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 2,
            "time_step_limit": [0.4, 0.9],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid-moe": (
        "granitemoehybrid",
        {
            **_GRANITE_HYBRID,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            **_QWEN3_5,
            **_MOE,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-next-features": (
        "qwen3_next",
        {
            **_QWEN3_5,
            **_MOE,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "linear_conv_kernel_dim": 2,
            "linear_value_head_dim": 8,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral-window": ("mixtral", {**_MIXTRAL, "sliding_window": 7, "tie_word_embeddings": True}),
    "qwen2-moe": ("qwen2_moe", _QWEN2_MOE),
    "qwen2-moe-normalized": (
        "qwen2_moe",
        {**_QWEN2_MOE, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen2-moe-dense-layer": (
        "qwen2_moe",
        {**_QWEN2_MOE, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen2-moe-step-window": (
        "qwen2_moe",
        {**_QWEN2_MOE, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen3-moe": ("qwen3_moe", _QWEN3_MOE),
    "qwen3-moe-normalized": (
        "qwen3_moe",
        {**_QWEN3_MOE, "norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen3-moe-dense-layer": (
        "qwen3_moe",
        {**_QWEN3_MOE, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen3-moe-step-window": (
        "qwen3_moe",
        {**_QWEN3_MOE, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    "olmoe": ("olmoe", _OLMOE),
    "olmoe-bias": ("olmoe", {**_OLMOE, "attention_bias": True, "tie_word_embeddings": True}),
    "olmoe-clip": (
        "olmoe",
        {
            **_OLMOE,
            "clip_qkv": 0.5,
            "norm_topk_prob": True,
            "num_key_value_heads": 2,
            "attention_bias": True,
        },
    ),
    "gpt-oss": ("gpt_oss", _GPT_OSS),
    "gpt-oss-square": ("gpt_oss", {**_GPT_OSS, "intermediate_size": 64, "attention_bias": False}),
    "gpt-oss-full": (
        "gpt_oss",
        {
            **_GPT_OSS,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {**ROPES["yarn"], "truncate": False},
        },
    ),
    "gpt-oss-limits": (
        "gpt_oss",
        {**_GPT_OSS, "swiglu_limit": 0.5, "swiglu_alpha": 1.1, "num_hidden_layers": 2},
    ),
}


FULLEST = list({kind: case for case, (kind, _) in CASES.items()}.values())
"""The last case of each family, which has most of its features."""


DENSE = [case for case in FULLEST if not {"num_experts", "num_local_experts"} & set(CASES[case][1])]
