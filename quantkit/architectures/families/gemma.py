"""Gemma 1 to 3: Llama whose norms add 1 to their weights, with GELU and larger embeddings."""

from __future__ import annotations

import math
from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import WINDOWED_BASE, Family, GgufArchitecture
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.names import BLOCK
from quantkit.base.json_values import Settings
from quantkit.errors import UnsupportedError

_ACTIVATION = "gelu_pytorch_tanh"
_HEAD_DIM = 256
_ATTENTION_CAP = "attn_logit_softcapping"
_LOGIT_CAP = "final_logit_softcapping"
_CAPS = (1e-3, 1e6)
_SCALAR = "query_pre_attn_scalar"


def _causal_features(settings: Settings) -> dict[str, Any]:
    """Read the features of all Gemma models, for `read_config`; raises `UnsupportedError` for
    bidirectional attention.
    """
    if settings.flag("use_bidirectional_attention", False):
        raise UnsupportedError("bidirectional attention is not supported", path=settings.path)
    return {
        "activation": "gelu_tanh",
        "tied_by_default": True,
        "norm_offset": 1.0,
        "embedding_multiplier": math.sqrt(settings.integer("hidden_size", 1, Limits.width)),
    }


# Gemma 1 (2403.08295).
def _read_gemma(settings: Settings) -> dict[str, Any]:
    if settings.has("hidden_activation"):
        activation_key = "hidden_activation"
        activations: tuple[str, ...] = (_ACTIVATION,)
    else:
        activation_key = "hidden_act"
        # The published files' name for it is "gelu".
        activations = (_ACTIVATION, "gelu")
    return {
        "activation_key": activation_key,
        "activations": activations,
        **_causal_features(settings),
    }


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    (Keys(_read_gemma, lambda config: {"hidden_activation": _ACTIVATION}), keys.ATTENTION_BIAS),
    options={"head_dim": _HEAD_DIM},
    gguf=GgufArchitecture(
        "gemma", tied=True, read=lambda gguf, _: {"hidden_activation": _ACTIVATION}
    ),
)


# Gemma 2 (2408.00118): norms before and after attention and feed-forward, soft caps, windows in
# every other layer.
def _read(settings: Settings) -> dict[str, Any]:
    if settings.has("head_dim"):
        head_dim = settings.integer("head_dim", 1, Limits.heads)
    else:
        head_dim = _HEAD_DIM
    if settings.has(_SCALAR):
        scalar = settings.integer(_SCALAR, 1, Limits.heads)
    else:
        scalar = _HEAD_DIM
    # The usual scale is None, so that it does not count as a feature that other formats lack.
    return {
        "activation_key": "hidden_activation",
        "activations": (_ACTIVATION,),
        "head_dim": head_dim,
        "norms": "both",
        "attention_scale": None if scalar == head_dim else scalar**-0.5,
        **_causal_features(settings),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    scale = config.attention_scale
    return {
        "hidden_activation": _ACTIVATION,
        _SCALAR: config.head_dim if scale is None else round(scale**-2),
    }


# The features of Gemma 2 and 3.
_FEATURES = Keys(_read, _write)
_NORMS = {
    "attention.output_norm": BLOCK + "post_attention_layernorm",
    "mlp.norm": BLOCK + "pre_feedforward_layernorm",
    "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
}
# Of transformers, if the keys are absent; null means none.
_DEFAULT_CAPS = {
    _ATTENTION_CAP: 50.0,
    _LOGIT_CAP: 30.0,
}


def _read_gguf2(gguf: Settings, head_dim: int) -> dict[str, Any]:
    """Read the caps as llama.cpp, which has defaults for them, and would divide by a cap of 0."""
    caps = {}
    for key, default in _DEFAULT_CAPS.items():
        caps[key] = gguf.number(key, *_CAPS) if gguf.has(key) else default
    return {"hidden_activation": _ACTIVATION, **caps}


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        _FEATURES,
        keys.ATTENTION_BIAS,
        keys.windows_by_kind(2),
        keys.number(_LOGIT_CAP, "logit_softcap", *_CAPS, _DEFAULT_CAPS[_LOGIT_CAP], null=None),
        keys.number(
            _ATTENTION_CAP, "attention_softcap", *_CAPS, _DEFAULT_CAPS[_ATTENTION_CAP], null=None
        ),
    ),
    names=_NORMS,
    gguf=GgufArchitecture(
        "gemma2",
        keys=(_ATTENTION_CAP, _LOGIT_CAP),
        window_period=2,
        default_window=4096,
        tied=True,
        wide_scale_layers=46,
        read=_read_gguf2,
        refused={
            "logits without soft caps": lambda config: (
                config.attention_softcap is None or config.logit_softcap is None
            ),
            "the absence of sliding-window layers": lambda config: keys.only_window(config) is None,
        },
    ),
)

# Gemma 3, text (2503.19786): Gemma 2 with norms of each head's queries and keys, and windows in
# five of six layers, which have different rotary positions.
_INTERVAL = 6
_PATTERN = "sliding_window_pattern"
_LOCAL = "rope_local_base_freq", 10000.0


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    # No reader caps attention, whatever a config states.
    written: dict[str, Any] = {_ATTENTION_CAP: None}
    full = [window is None for window in config.windows]
    if not all(full):
        written[_LOCAL[0]] = (config.window_rope or config.rope).theta
    if any(full):
        interval = full.index(True) + 1
    else:
        # Beyond the last layer, so that no layer has full attention.
        interval = config.num_layers + 1
    regular = [(layer + 1) % interval == 0 for layer in range(config.num_layers)]
    # For older readers, without ``layer_types``.
    if full == regular:
        written[_PATTERN] = interval
    return written


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        _FEATURES,
        keys.ATTENTION_BIAS,
        keys.windows_by_kind(_INTERVAL, _PATTERN),
        keys.number(_LOGIT_CAP, "logit_softcap", *_CAPS, None, null=None),
        Keys(write=_write_gemma3),
        keys.LAYER_ROPES,
    ),
    options={"qk_norm": "head", "default_theta": 1e6, "windowed_theta": _LOCAL},
    names=_NORMS,
    gguf=GgufArchitecture(
        "gemma3",
        keys=(WINDOWED_BASE, _LOGIT_CAP),
        window_period=_INTERVAL,
        wide_scale_layers=62,
        read=lambda gguf, _: {
            "hidden_activation": _ACTIVATION,
            _LOGIT_CAP: keys.optional_number(gguf, _LOGIT_CAP),
        },
        refused={"a soft cap of logits": lambda config: config.logit_softcap is not None},
    ),
)
