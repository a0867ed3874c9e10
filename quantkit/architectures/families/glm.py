"""GLM-4 of 2024 (2406.12793): biases on queries, keys and values, half of each head turned, in pairs side by side."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family, read_config
from quantkit.architectures.names import CANONICAL
from quantkit.json_values import Settings

FUSED = {"mlp.gate_up": CANONICAL["mlp.gate_up"]}
_HEAD_DIM, _TURNED = 128, 0.5  # of transformers, where the keys are absent


def read_glm(settings: Settings, **features: Any) -> ModelConfig:
    """The keys that all models of this line have.

    Args:
        features: further fields of `ModelConfig`.
    """
    return read_config(
        settings, head_dim=_HEAD_DIM, partial_rotary=_TURNED, qkv_bias=settings.flag("attention_bias", True), **features
    )


def write_glm(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_glm` reads; the part of a head that turns is said also where that is all of it."""
    partial = (config.rope.rotary_dim or config.head_dim) / config.head_dim
    return {"attention_bias": config.qkv_bias, "partial_rotary_factor": partial}


FAMILY = Family("glm", "GlmForCausalLM", read_glm, write_glm, fused=FUSED, interleaved_rotary=True)
