"""Configurations of every family, and the ends of their layers' kinds."""

from __future__ import annotations

from typing import Any

ENDS = {"bos_token_id": 1, "eos_token_id": 2}


_YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 150000.0,
}


_QWEN3_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
    "head_dim": 16,
}


_DEEPSEEK = {
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_shared_experts": 2,
}


_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": 0,
}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "glm": ("glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("glm4", {"head_dim": 16, "pad_token_id": 0}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "ministral3": ("ministral3", {"head_dim": 16, "pad_token_id": 0}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-bias": ("lfm2", {"layer_types": ["conv"] * 3, "conv_bias": True}),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "moe_intermediate_size": 48,
        },
    ),
    "qwen3-5": (
        "qwen3_5_text",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "bamba": (
        "bamba",
        {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8},
    ),
    "bamba-bias": (
        "bamba",
        {
            "attn_layer_indices": [],
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mlp_bias": True,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron-h-moe": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "use_conv_bias": False,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 24,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "mamba_proj_bias": True,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
        },
    ),
    "granitemoehybrid-moe": (
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_conv_bias": False,
            "num_local_experts": 4,
            "shared_intermediate_size": 40,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
        },
    ),
    "cohere2": ("cohere2", {"attention_bias": True, "pad_token_id": 0}),
    "exaone4": ("exaone4", {"tie_word_embeddings": True}),
    "hunyuan-dense": ("hunyuan_v1_dense", {"head_dim": 8, "pad_token_id": 0}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2-moe": (
        "qwen2_moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-moe": ("qwen3_moe", _QWEN3_MOE),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 8, "rope_parameters": _YARN}),
    "gemma": ("gemma", {"head_dim": 8, "pad_token_id": 0}),
    "gemma2": ("gemma2", {"head_dim": 8, "pad_token_id": 0}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "pad_token_id": 0}),
    "gemma4": ("gemma4_text", {**_GEMMA4, "attention_k_eq_v": True, "attention_bias": True}),
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
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 8,
            "intermediate_size": 48,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4}),
    "phi3": ("phi3", {"pad_token_id": 0}),
    "deepseek-v3": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": 12}),
    "deepseek-v3-lite": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": None}),
}
