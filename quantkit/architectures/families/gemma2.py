"""Gemma 2 (2408.00118): norms before and after attention and feed-forward, windows in every other layer."""

from __future__ import annotations

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import (
    Family,
    layer_count,
    layer_types,
    read_config,
    sliding_window,
    windowed,
)
from quantkit.architectures.names import BLOCK
from quantkit.json_values import Settings

_HEAD_DIM = 256


def _read(settings: Settings) -> ModelConfig:
    count = layer_count(settings)
    types = layer_types(settings, count) or ["sliding_attention", "full_attention"] * count
    return read_config(
        settings,
        windowed(types[:count], sliding_window(settings)),
        activation_key="hidden_activation",
        activations=("gelu_pytorch_tanh",),
        head_dim=_HEAD_DIM,
        tied_by_default=True,
        norms="both",
    )


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    _read,
    names={
        "attention.output_norm": BLOCK + "post_attention_layernorm",
        "mlp.norm": BLOCK + "pre_feedforward_layernorm",
        "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
    },
    runs=False,
)
