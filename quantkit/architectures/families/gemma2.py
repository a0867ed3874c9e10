"""Gemma 2 (2408.00118): norms before and after attention and feed-forward, soft caps, windows in every other layer."""

from __future__ import annotations

import math
from typing import Any

from quantkit.architectures.config import MAX_HEADS, MAX_WIDTH, ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.keys import ATTENTION_BIAS, Keys, number, only_window, windows_by_kind
from quantkit.architectures.names import BLOCK
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

ACTIVATION = "gelu_pytorch_tanh"
HEAD_DIM = 256
ATTENTION_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
CAPS = (1e-3, 1e6)
_ATTENTION_CAP, _LOGIT_CAP = 50.0, 30.0  # of transformers, if the keys are absent; null means none
_INTERVAL = 2
_SCALAR = "query_pre_attn_scalar"

NORMS = {
    "attention.output_norm": BLOCK + "post_attention_layernorm",
    "mlp.norm": BLOCK + "pre_feedforward_layernorm",
    "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
}
"""Names on disk of the norms of a family that has them before and after."""


def causal_features(settings: Settings) -> dict[str, Any]:
    """The features of all Gemma models, for `read_config`.

    Raises:
        UnsupportedError: for bidirectional attention.
    """
    if settings.flag("use_bidirectional_attention", False):
        raise UnsupportedError("bidirectional attention is not supported", path=settings.path)
    return {
        "activation": "gelu_tanh",
        "tied_by_default": True,
        "norm_offset": 1.0,
        "embedding_multiplier": math.sqrt(settings.integer("hidden_size", 1, MAX_WIDTH)),
    }


def _read(settings: Settings) -> dict[str, Any]:
    head_dim = settings.integer("head_dim", 1, MAX_HEADS) if settings.has("head_dim") else HEAD_DIM
    scalar = settings.integer(_SCALAR, 1, MAX_HEADS) if settings.has(_SCALAR) else HEAD_DIM
    return {
        "activation_key": "hidden_activation",
        "activations": (ACTIVATION,),
        "head_dim": head_dim,
        "norms": "both",
        "attention_scale": None if scalar == head_dim else scalar**-0.5,
        **causal_features(settings),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    scale = config.attention_scale
    return {"hidden_activation": ACTIVATION, _SCALAR: config.head_dim if scale is None else round(scale**-2)}


FEATURES = Keys(_read, _write)
"""Those of Gemma 2 and 3."""


def _read_gguf(keys: Settings, head_dim: int) -> dict[str, Any]:
    """llama.cpp has its own defaults for caps; it would divide by a cap of 0."""
    caps = {ATTENTION_CAP: _ATTENTION_CAP, LOGIT_CAP: _LOGIT_CAP}
    stated = {key: keys.number(key, *CAPS) if keys.has(key) else default for key, default in caps.items()}
    return {"hidden_activation": ACTIVATION, **stated}


GGUF = GgufArchitecture(
    "gemma2", keys=(ATTENTION_CAP, LOGIT_CAP), window_period=_INTERVAL, default_window=4096,
    tied=True, wide_scale_layers=46, read=_read_gguf,
    refused={
        "logits without soft caps": lambda config: config.attention_softcap is None or config.logit_softcap is None,
        "layers none of which has a window": lambda config: only_window(config) is None,
    },
)  # fmt: skip
FAMILY = Family(
    "gemma2", "Gemma2ForCausalLM",
    (
        FEATURES, ATTENTION_BIAS, windows_by_kind(_INTERVAL),
        number(LOGIT_CAP, "logit_softcap", *CAPS, _LOGIT_CAP, null=None),
        number(ATTENTION_CAP, "attention_softcap", *CAPS, _ATTENTION_CAP, null=None),
    ),
    names=NORMS, gguf=GGUF,
)  # fmt: skip
