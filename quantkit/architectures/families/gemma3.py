"""Gemma 3, text (2503.19786): Gemma 2 with norms of each head's queries and keys, and windows in five of six layers,
which have different rotary positions."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gemma2 import ACTIVATION, ATTENTION_CAP, CAPS, FEATURES, LOGIT_CAP, NORMS
from quantkit.architectures.families.gguf_architecture import WINDOWED_BASE, GgufArchitecture, optional_number
from quantkit.architectures.families.keys import ATTENTION_BIAS, LAYER_ROPES, Keys, number, windows_by_kind
from quantkit.json_values import Settings

_INTERVAL = 6
_PATTERN = "sliding_window_pattern"
_LOCAL = "rope_local_base_freq", 10000.0


def _write(config: ModelConfig) -> dict[str, Any]:
    written: dict[str, Any] = {ATTENTION_CAP: None}  # no reader caps attention, whatever a config states
    full = [window is None for window in config.windows]
    if not all(full):
        written[_LOCAL[0]] = (config.window_rope or config.rope).theta
    interval = full.index(True) + 1 if any(full) else config.num_layers + 1
    if full == [(layer + 1) % interval == 0 for layer in range(config.num_layers)]:
        written[_PATTERN] = interval  # for older readers, without ``layer_types``
    return written


def _read_gguf(keys: Settings, head_dim: int) -> dict[str, Any]:
    return {"hidden_activation": ACTIVATION, LOGIT_CAP: optional_number(keys, LOGIT_CAP)}


GGUF = GgufArchitecture(
    "gemma3", keys=(WINDOWED_BASE, LOGIT_CAP), window_period=_INTERVAL, wide_scale_layers=62, read=_read_gguf,
    refused={"a soft cap of logits": lambda config: config.logit_softcap is not None},
)  # fmt: skip
FAMILY = Family(
    "gemma3_text", "Gemma3ForCausalLM",
    (
        FEATURES, ATTENTION_BIAS, windows_by_kind(_INTERVAL, _PATTERN),
        number(LOGIT_CAP, "logit_softcap", *CAPS, None, null=None), Keys(write=_write), LAYER_ROPES,
    ),
    options={"qk_norm": "head", "default_theta": 1e6, "windowed_theta": _LOCAL},
    names=NORMS, rope_by_layer=True, gguf=GGUF,
)  # fmt: skip
