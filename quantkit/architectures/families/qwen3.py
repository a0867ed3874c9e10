"""Qwen3, dense (2505.09388): norms on each head's queries and keys, a head size of its own."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family, read_config
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.qwen2 import qwen_layers, write_qwen_layers
from quantkit.json_values import Settings


def _read(settings: Settings) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    return read_config(
        settings, qwen_layers(settings), head_dim_required=True, qkv_bias=bias, output_bias=bias, qk_norm="head"
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.output_bias, **write_qwen_layers(config)}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", _read, _write, gguf=GgufArchitecture("qwen3"))
