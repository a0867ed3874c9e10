"""OLMoE (2409.02060): many small experts, norms over all queries and all keys of a token, bounded projections."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.families.experts import experts_of, read_experts
from quantkit.architectures.families.family import Family, layer_count, read_config
from quantkit.architectures.families.gguf_architecture import EXPERT_KEYS, GgufArchitecture
from quantkit.json_values import Settings

_CLIP = (1e-6, 1e6)


def _read(settings: Settings) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    return read_config(
        settings, [LayerConfig(experts=True)] * layer_count(settings), kv_heads_required=False,
        qkv_bias=bias, output_bias=bias, qk_norm="width",
        clip_qkv=settings.number("clip_qkv", *_CLIP) if settings.has("clip_qkv") else None,
        experts=read_experts(settings, normalized=settings.flag("norm_topk_prob", False)),
    )  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "attention_bias": config.output_bias,
        "clip_qkv": config.clip_qkv,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.normalized,
    }


GGUF = GgufArchitecture(
    "olmoe", keys=EXPERT_KEYS[:2], normalized=False, tied=False, full_width=True,
    refused={"fewer KV heads than heads": lambda config: config.num_kv_heads != config.num_heads},
)  # fmt: skip
FAMILY = Family("olmoe", "OlmoeForCausalLM", _read, _write, gguf=GGUF)
