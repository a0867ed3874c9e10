"""Qwen3-MoE (2505.09388): Qwen3 with many small experts, in all layers or some."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.families.experts import experts_of, read_experts, sparse_layers, written_sparse_layers
from quantkit.architectures.families.family import Family, only_window, read_config, sliding_window
from quantkit.architectures.families.gguf_architecture import EXPERT_KEYS, GgufArchitecture
from quantkit.json_values import Settings


def _read(settings: Settings) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    window = sliding_window(settings) if settings.flag("use_sliding_window", False) else None
    experts = read_experts(settings, "moe_intermediate_size", normalized=settings.flag("norm_topk_prob", False))
    return read_config(
        settings, [LayerConfig(window=window, experts=sparse) for sparse in sparse_layers(settings)],
        qkv_bias=bias, output_bias=bias, qk_norm="head", experts=experts,
    )  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    experts, window = experts_of(config), only_window(config)
    return {
        "attention_bias": config.output_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.normalized,
        **written_sparse_layers(config),
    }


GGUF = GgufArchitecture("qwen3moe", keys=EXPERT_KEYS, normalized=True)
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read, _write, gguf=GGUF)
