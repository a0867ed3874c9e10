"""Llama 1 to 3.x and CodeLlama (2302.13971, 2307.09288, 2407.21783)."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family, read_config
from quantkit.architectures.families.gguf_architecture import ALL_BIASES, EXPERT_KEYS, GgufArchitecture
from quantkit.json_values import Settings


def _read(settings: Settings) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    return read_config(
        settings, kv_heads_required=False, qkv_bias=bias, output_bias=bias, mlp_bias=settings.flag("mlp_bias", False)
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.output_bias, "mlp_bias": config.mlp_bias}


GGUF = GgufArchitecture(
    "llama", keys=EXPERT_KEYS[:2], interleaved_rotary=True, biases=ALL_BIASES, rope_freqs=True, long_rope=True,
    normalized=True, dense_too=True,
)  # fmt: skip
FAMILY = Family("llama", "LlamaForCausalLM", _read, _write, gguf=GGUF)
