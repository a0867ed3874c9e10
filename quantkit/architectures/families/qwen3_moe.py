"""Qwen3-MoE (2505.09388): Qwen3 with many small experts, in all layers or some."""

from __future__ import annotations

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import EXPERT_KEYS, GgufArchitecture
from quantkit.architectures.families.keys import (
    ATTENTION_BIAS,
    SPARSE_LAYERS,
    experts,
    layer_count,
    sliding_window,
    switched_windows,
)
from quantkit.json_values import Settings


def _windows(settings: Settings) -> list[int | None]:
    window = sliding_window(settings) if settings.flag("use_sliding_window", False) else None
    return [window] * layer_count(settings)


FAMILY = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM",
    (
        ATTENTION_BIAS, switched_windows(_windows, lambda config: {}),
        experts(size_key="moe_intermediate_size", norm_key="norm_topk_prob"), SPARSE_LAYERS,
    ),
    options={"qk_norm": "head"}, gguf=GgufArchitecture("qwen3moe", keys=EXPERT_KEYS, normalized=True),
)  # fmt: skip
