"""Gemma 2 (2408.00118): norms before and after attention and feed-forward, soft caps, windows in every other layer."""

from __future__ import annotations

import math
from typing import Any

from quantkit.architectures.config import MAX_HEADS, MAX_WIDTH, ModelConfig
from quantkit.architectures.families.family import (
    Family,
    layers_by_kind,
    only_window,
    read_config,
    written_layer_types,
    written_window,
)
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.names import BLOCK
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

_HEAD_DIM = 256
_INTERVAL = 2
_ATTENTION_SOFTCAP, _LOGIT_SOFTCAP = 50.0, 30.0  # of transformers, where the keys are absent; null means none
_SOFTCAPS = (1e-3, 1e6)
_SCALAR = "query_pre_attn_scalar"

NORMS = {
    "attention.output_norm": BLOCK + "post_attention_layernorm",
    "mlp.norm": BLOCK + "pre_feedforward_layernorm",
    "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
}
"""Names on disk of the norms of a family that has them before and after."""


def _read(settings: Settings) -> ModelConfig:
    return read_config(
        settings,
        layers_by_kind(settings, _INTERVAL),
        attention_softcap=softcap(settings, "attn_logit_softcapping", _ATTENTION_SOFTCAP),
        logit_softcap=softcap(settings, "final_logit_softcapping", _LOGIT_SOFTCAP),
        **gemma_features(settings),
    )


def gemma_features(settings: Settings) -> dict[str, Any]:
    """What the configs of Gemma 2 and 3 say alike, for `read_config`.

    Raises:
        CheckpointError: if a value is of the wrong type or out of range.
        UnsupportedError: for attention in both directions.
    """
    require_causal(settings)
    bias = settings.flag("attention_bias", False)
    head_dim = settings.whole("head_dim", 1, MAX_HEADS) if settings.has("head_dim") else _HEAD_DIM
    scalar = settings.whole(_SCALAR, 1, MAX_HEADS) if settings.has(_SCALAR) else _HEAD_DIM
    return {
        "activation_key": "hidden_activation",
        "activations": ("gelu_pytorch_tanh",),
        "activation": "gelu_tanh",
        "head_dim": head_dim,
        "tied_by_default": True,
        "norms": "both",
        "norm_offset": 1.0,
        "embedding_multiplier": embedding_multiplier(settings),
        "attention_scale": None if scalar == head_dim else scalar**-0.5,
        "qkv_bias": bias,
        "output_bias": bias,
    }


def require_causal(settings: Settings) -> None:
    """
    Raises:
        UnsupportedError: for attention in both directions.
    """
    if settings.flag("use_bidirectional_attention", False):
        raise UnsupportedError("attention in both directions is not supported", path=settings.path)


def embedding_multiplier(settings: Settings) -> float:
    """What Gemma's embeddings are multiplied by: the root of their width."""
    return math.sqrt(settings.whole("hidden_size", 1, MAX_WIDTH))


def softcap(settings: Settings, key: str, default: float | None) -> float | None:
    """What scores are bent to stay below; null means nothing."""
    if key not in settings.values:
        return default
    return settings.number(key, *_SOFTCAPS) if settings.has(key) else None


def write_gemma(config: ModelConfig) -> dict[str, Any]:
    """The keys that Gemma 2 and 3 have in common."""
    scale = config.attention_scale
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        _SCALAR: config.head_dim if scale is None else round(scale**-2),
        "attention_bias": config.output_bias,
        "sliding_window": written_window(config),
        "layer_types": written_layer_types(config),
        "final_logit_softcapping": config.logit_softcap,
        "attn_logit_softcapping": config.attention_softcap,
    }


def _read_gguf(keys: Settings, head_dim: int) -> dict[str, Any]:
    """llama.cpp takes its own caps where the keys are absent; a cap of 0 would divide by it."""
    caps = zip(GGUF.keys, (_ATTENTION_SOFTCAP, _LOGIT_SOFTCAP), strict=True)
    stated = {key: keys.number(key, *_SOFTCAPS) if keys.has(key) else default for key, default in caps}
    return {"hidden_activation": "gelu_pytorch_tanh", **stated}


GGUF = GgufArchitecture(
    "gemma2", keys=("attn_logit_softcapping", "final_logit_softcapping"), window_period=_INTERVAL, default_window=4096,
    tied=True, wide_scale_layers=46, read=_read_gguf,
    refused={
        "logits without soft caps": lambda config: config.attention_softcap is None or config.logit_softcap is None,
        "layers none of which has a window": lambda config: only_window(config) is None,
    },
)  # fmt: skip
FAMILY = Family("gemma2", "Gemma2ForCausalLM", _read, write_gemma, names=NORMS, gguf=GGUF)
