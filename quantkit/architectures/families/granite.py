"""Granite 3 (IBM): Llama with four multipliers: of embeddings, residual branches, attention scores and logits."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family, read_config
from quantkit.json_values import Settings

_LEAST, _MOST = 1e-6, 1e6  # of a multiplier, far beyond what is published


def _read(settings: Settings) -> ModelConfig:
    def multiplier(key: str) -> float:
        return settings.number(key, _LEAST, _MOST) if settings.has(key) else 1.0

    bias = settings.flag("attention_bias", False)
    return read_config(
        settings,
        kv_heads_required=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=settings.flag("mlp_bias", False),
        embedding_multiplier=multiplier("embedding_multiplier"),
        residual_multiplier=multiplier("residual_multiplier"),
        attention_scale=multiplier("attention_multiplier"),
        logit_multiplier=1 / multiplier("logits_scaling"),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "attention_multiplier": config.attention_scale,
        "logits_scaling": 1 / config.logit_multiplier,
    }


FAMILY = Family("granite", "GraniteForCausalLM", _read, _write)
