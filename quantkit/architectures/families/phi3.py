"""Phi-3, 3.5 and 4 (2404.14219): Llama with fused projections on disk: one tensor for q, k, v, one for gate and up."""

from __future__ import annotations

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.families.family import Family, layer_count, read_config, sliding_window
from quantkit.architectures.names import CANONICAL
from quantkit.json_values import Settings


def _read(settings: Settings) -> ModelConfig:
    layer = LayerConfig(window=sliding_window(settings, None))
    return read_config(settings, [layer] * layer_count(settings), kv_heads_required=False)


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read,
    fused={role: CANONICAL[role] for role in ("attention.qkv", "mlp.gate_up")},
    runs=False,
)
