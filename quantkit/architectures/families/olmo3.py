"""OLMo 3 (2512.13961): OLMo 2 with a window in three layers of four, whose rotary positions are not stretched."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import (
    Family,
    layers_by_kind,
    only_window,
    read_config,
    written_layer_ropes,
    written_layer_types,
)
from quantkit.architectures.families.olmo2 import NORMS, olmo_features, write_olmo
from quantkit.json_values import Settings

_INTERVAL = 4
_THETA = 500000.0


def _read(settings: Settings) -> ModelConfig:
    return read_config(
        settings,
        layers_by_kind(settings, _INTERVAL),
        default_theta=_THETA,
        windowed_theta=("rope_theta", _THETA),
        **olmo_features(settings),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_olmo(config),
        **written_layer_ropes(config),
        "sliding_window": only_window(config),
        "layer_types": written_layer_types(config),
    }


FAMILY = Family("olmo3", "Olmo3ForCausalLM", _read, _write, names=NORMS)
