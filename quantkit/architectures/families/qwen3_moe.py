"""Qwen3-MoE (2505.09388): Qwen3 with many small experts, in all layers or some."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import EXPERT_KEYS, GgufArchitecture
from quantkit.architectures.families.keys import (
    ATTENTION_BIAS,
    SPARSE_LAYERS,
    Keys,
    experts,
    layer_count,
    only_window,
    sliding_window,
)
from quantkit.json_values import Settings


def _read_window(settings: Settings) -> dict[str, Any]:
    window = sliding_window(settings) if settings.flag("use_sliding_window", False) else None
    return {"windows": [window] * layer_count(settings)}


def _write_window(config: ModelConfig) -> dict[str, Any]:
    window = only_window(config)
    return {"use_sliding_window": window is not None, "sliding_window": window}


FAMILY = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM",
    (
        ATTENTION_BIAS, Keys(_read_window, _write_window),
        experts(size_key="moe_intermediate_size", norm_key="norm_topk_prob"), SPARSE_LAYERS,
    ),
    options={"qk_norm": "head"}, gguf=GgufArchitecture("qwen3moe", keys=EXPERT_KEYS, normalized=True),
)  # fmt: skip
