"""Ministral 3 (Mistral AI): Mistral with YaRN, and queries that grow with their positions, as in Llama 4.

What is published has a vision tower beside it, under the name ``mistral3``.
"""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.families.family import (
    Family,
    layer_count,
    only_window,
    read_config,
    sliding_window,
    with_default_rope,
)
from quantkit.json_values import Settings

_HEAD_DIM = 128
_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""Of transformers, where a config says nothing of rotary positions."""


def _read(settings: Settings) -> ModelConfig:
    settings = with_default_rope(settings, _ROPE)
    layer = LayerConfig(window=sliding_window(settings, None))
    return read_config(settings, [layer] * layer_count(settings), head_dim=_HEAD_DIM, query_scaling=True)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": only_window(config)}


FAMILY = Family("ministral3", "Ministral3ForCausalLM", _read, _write)
