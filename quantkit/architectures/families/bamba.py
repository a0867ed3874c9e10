"""Bamba (IBM): Mamba-2 between layers with attention, half of whose heads' dimensions rotate.

Its description is the code of transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.granite_hybrid import GGUF_BAMBA, GRANITE_HYBRID_GGUF
from quantkit.architectures.families.keys import Keys, layer_count
from quantkit.architectures.families.mamba import GGUF_MAMBA, read_mamba, write_mamba
from quantkit.architectures.names import BLOCK
from quantkit.base.json_values import Settings

_PARTIAL = "partial_rotary_factor"
_ATTENTION = GGUF_BAMBA


def _prepare(settings: Settings) -> Settings:
    """Drop the rotated part of a head outside of the rotary settings, which transformers replaces
    by a half.
    """
    values = {key: value for key, value in settings.values.items() if key != _PARTIAL}
    return Settings(values, settings.path)


def _read_layers(settings: Settings) -> dict[str, Any]:
    """Read the numbers of the layers with attention; all others have Mamba-2."""
    numbers = []
    if settings.has(_ATTENTION):
        numbers = settings.integers(_ATTENTION, 0, Limits.layers)
    mixers = []
    for layer in range(layer_count(settings)):
        mixers.append("attention" if layer in numbers else "mamba2")
    return {"mixers": mixers, "mamba2": read_mamba(settings)}


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    return {_ATTENTION: config.attention_layers, **write_mamba(config)}


def _write_rotary(config: ModelConfig) -> dict[str, Any]:
    """Write the rotated part of a head among the rotary settings, the only place where transformers
    reads it.
    """
    part = (config.rope.rotary_dim or config.head_dim) / config.head_dim
    written = {}
    for key, value in config.rope.to_hf(config.head_dim).items():
        if isinstance(value, dict):
            written[key] = {**value, _PARTIAL: part}
    return written


_FEED_FORWARD = BLOCK + "feed_forward."

BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    (
        keys.ATTENTION_BIAS,
        keys.MLP_BIAS,
        Keys(_read_layers, _write_layers),
        Keys(write=_write_rotary),
    ),
    options={"partial_rotary": 0.5, "leading_rotary": True},
    prepare=_prepare,
    in_mlx=False,
    names={
        "norm": "model.final_layernorm",
        "mlp.norm": BLOCK + "pre_ff_layernorm",
        "mlp.gate": _FEED_FORWARD + "gate_proj",
        "mlp.up": _FEED_FORWARD + "up_proj",
        "mlp.down": _FEED_FORWARD + "down_proj",
    },
    gguf=replace(GRANITE_HYBRID_GGUF, keys=GGUF_MAMBA, biases=("qkv", "output", "mlp")),
    gguf_mark=GGUF_BAMBA,
)
