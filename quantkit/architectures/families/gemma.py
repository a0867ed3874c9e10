"""Gemma 1 (2403.08295): Llama whose norms add 1 to their weights, with GELU and larger embeddings."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family, read_config
from quantkit.architectures.families.gemma2 import embedding_multiplier, require_causal
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.json_values import Settings

_ACTIVATION = "gelu_pytorch_tanh"


def _read(settings: Settings) -> ModelConfig:
    require_causal(settings)
    bias = settings.flag("attention_bias", False)
    own = settings.has("hidden_activation")
    return read_config(
        settings,
        activation_key="hidden_activation" if own else "hidden_act",
        activations=(_ACTIVATION,) if own else (_ACTIVATION, "gelu"),  # the published files' word for it
        activation="gelu_tanh",
        head_dim=256,
        tied_by_default=True,
        norm_offset=1.0,
        embedding_multiplier=embedding_multiplier(settings),
        qkv_bias=bias,
        output_bias=bias,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"hidden_activation": _ACTIVATION, "attention_bias": config.output_bias}


GGUF = GgufArchitecture("gemma", tied=True, read=lambda keys, head_dim: {"hidden_activation": _ACTIVATION})
FAMILY = Family("gemma", "GemmaForCausalLM", _read, _write, gguf=GGUF)
