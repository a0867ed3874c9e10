"""Gemma 3, text (2503.19786): Gemma 2 with norms on each head's queries and keys, and a window in five layers of six,
whose rotary positions are others."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import MAX_LAYERS, ModelConfig
from quantkit.architectures.families.family import Family, layers_by_kind, read_config, written_layer_ropes
from quantkit.architectures.families.gemma2 import NORMS, gemma_features, softcap, write_gemma
from quantkit.architectures.families.gguf_architecture import WINDOWED_BASE, GgufArchitecture, optional_number
from quantkit.json_values import Settings

_INTERVAL = 6
_THETA = 1e6
_PATTERN = "sliding_window_pattern"
_LOGIT_CAP = "final_logit_softcapping"
_LOCAL = "rope_local_base_freq", 10000.0


def _read(settings: Settings) -> ModelConfig:
    interval = settings.whole(_PATTERN, 1, MAX_LAYERS) if settings.has(_PATTERN) else _INTERVAL
    return read_config(
        settings,
        layers_by_kind(settings, interval),
        default_theta=_THETA,
        windowed_theta=_LOCAL,
        qk_norm="head",
        logit_softcap=softcap(settings, _LOGIT_CAP, None),  # no reader caps attention, whatever is said
        **gemma_features(settings),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    written = {**write_gemma(config), **written_layer_ropes(config)}
    whole = [window is None for window in config.windows]
    if not all(whole):
        written[_LOCAL[0]] = (config.window_rope or config.rope).theta
    interval = whole.index(True) + 1 if any(whole) else config.num_layers + 1
    if whole == [(layer + 1) % interval == 0 for layer in range(config.num_layers)]:
        written[_PATTERN] = interval  # readers before ``layer_types``
    return written


def _read_gguf(keys: Settings, head_dim: int) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", _LOGIT_CAP: optional_number(keys, _LOGIT_CAP)}


GGUF = GgufArchitecture(
    "gemma3", keys=(WINDOWED_BASE, _LOGIT_CAP), window_period=_INTERVAL, wide_scale_layers=62, read=_read_gguf,
    refused={"a soft cap of logits": lambda config: config.logit_softcap is not None},
)  # fmt: skip
FAMILY = Family(
    "gemma3_text", "Gemma3ForCausalLM", _read, _write, names=NORMS, rope_by_layer=True, gguf=GGUF
)  # fmt: skip
