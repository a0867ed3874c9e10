"""OLMo 3 (2512.13961): OLMo 2 with a window in three layers of four, whose rotary positions are not stretched."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families.family import (
    Family,
    layers_by_kind,
    read_config,
    written_layer_ropes,
    written_layer_types,
    written_window,
)
from quantkit.architectures.families.olmo2 import GGUF, NORMS, olmo_features, write_olmo
from quantkit.architectures.rope import MAX_THETA, MIN_THETA, SLIDING
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

_INTERVAL = 4
_THETA = 500000.0


def _read(settings: Settings) -> ModelConfig:
    layers = layers_by_kind(settings, _INTERVAL)
    if any(layer.window is not None for layer in layers):
        _require_one_base(settings)
    return read_config(
        settings,
        layers,
        default_theta=_THETA,
        windowed_theta=("rope_theta", _THETA),
        **olmo_features(settings),
    )


def _require_one_base(settings: Settings) -> None:
    """
    Raises:
        UnsupportedError: for a base that some readers take for all layers, and transformers for those without a window.
    """
    kinds = settings.inside("rope_parameters") if settings.has("rope_parameters") else settings
    told = kinds.has(SLIDING) and kinds.inside(SLIDING).has("rope_theta")
    if settings.has("rope_theta") and not told and settings.number("rope_theta", MIN_THETA, MAX_THETA) != _THETA:
        raise UnsupportedError(
            "readers differ on the rotary base of layers with a window", path=settings.path,
            found=f"rope_theta {settings.values['rope_theta']}", expected="rope_parameters by kind of layer",
        )  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_olmo(config),
        **written_layer_ropes(config),
        "sliding_window": written_window(config),
        "layer_types": written_layer_types(config),
    }


FAMILY = Family(
    "olmo3", "Olmo3ForCausalLM", _read, _write, names=NORMS, rope_by_layer=True, gguf=GGUF, gguf_mark="sliding_window"
)  # fmt: skip
