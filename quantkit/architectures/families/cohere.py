"""Cohere 2 (Command R7B, Command A; 2504.00698): attention and feed-forward read the same normed
states, norms subtract the mean, and only layers with a window have rotary positions.

Its description is the code of transformers.
"""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import LAYER_NORM_EPS, Family, GgufArchitecture
from quantkit.architectures.families.keys import Keys
from quantkit.base.json_values import Settings

_EPS = "layer_norm_eps"
# Transformers' defaults, if a key is absent.
_DEFAULT_EPS = 1e-5
_LOGIT_SCALE = 0.0625
# Far beyond what is published.
_SCALES = (1e-6, 1e6)
_WINDOWS = keys.windows_by_kind(4, "sliding_window_pattern")


def _prepare(settings: Settings) -> Settings:
    """Rename the epsilon of norms to that of other families."""
    values = dict(settings.values)
    values["rms_norm_eps"] = values.get(_EPS, _DEFAULT_EPS)
    return Settings(values, settings.path)


def _read_windows(settings: Settings) -> dict[str, Any]:
    """Read the windows of the layers; those without one have no rotary positions."""
    values = _WINDOWS.read(settings)
    rotary = [window is not None for window in values["windows"]]
    return {**values, "rotary": rotary}


def _write_eps(config: ModelConfig) -> dict[str, Any]:
    return {_EPS: config.norm_eps}


def _read_gguf(gguf: Settings, head_dim: int) -> dict[str, Any]:
    return {
        _EPS: gguf.number(LAYER_NORM_EPS, *Limits.eps),
        "logit_scale": gguf.number("logit_scale", *_SCALES),
    }


COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    (
        keys.ATTENTION_BIAS,
        keys.number("logit_scale", "logit_multiplier", *_SCALES, _LOGIT_SCALE, null=_LOGIT_SCALE),
        Keys(_read_windows, _WINDOWS.write),
        Keys(write=_write_eps),
    ),
    options={
        "centered_norms": True,
        "kv_heads_required": False,
        "parallel_branches": True,
        "tied_by_default": True,
    },
    prepare=_prepare,
    interleaved_rotary=True,
    gguf=GgufArchitecture(
        "cohere2",
        keys=("logit_scale",),
        interleaved_rotary=True,
        window_period=4,
        # Of the published models; llama.cpp does not load a file without a width.
        default_window=keys.DEFAULT_WINDOW,
        tied=True,
        full_width=True,
        eps_key=LAYER_NORM_EPS,
        multiplies_logits=True,
        read=_read_gguf,
        refused={
            "the absence of sliding-window layers": lambda config: keys.only_window(config) is None
        },
    ),
)
