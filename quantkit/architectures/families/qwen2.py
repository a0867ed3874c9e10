"""Qwen2 and Qwen2.5 (2407.10671): biases of queries, keys and values; windows in some layers."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import MAX_CONTEXT, ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.keys import (
    layer_count,
    layer_types,
    sliding_window,
    switched_windows,
    written_layer_types,
)
from quantkit.architectures.rope import SLIDING
from quantkit.json_values import Settings

_FIRST_WINDOW_LAYER = 28  # of transformers, if the key is absent


def _windows(settings: Settings) -> list[int | None]:
    """Windows, if the config enables them, in the layers that it lists, or from a layer on."""
    layers = layer_count(settings)
    types = layer_types(settings, layers)
    window = sliding_window(settings)
    if window is None or not settings.flag("use_sliding_window", False):
        return [None] * layers
    key = "max_window_layers"
    first = settings.integer(key, 0, MAX_CONTEXT) if settings.has(key) and not types else _FIRST_WINDOW_LAYER
    windowed = [kind == SLIDING for kind in types] or [layer >= first for layer in range(layers)]
    return [window if has_window else None for has_window in windowed]


def _write(config: ModelConfig) -> dict[str, Any]:
    first = next((i for i, window in enumerate(config.windows) if window is not None), config.num_layers)
    return {"max_window_layers": first, "layer_types": written_layer_types(config)}


WINDOWS = switched_windows(_windows, _write)
FAMILY = Family(
    "qwen2", "Qwen2ForCausalLM", (WINDOWS,), {"qkv_bias": True}, gguf=GgufArchitecture("qwen2", biases=("qkv",))
)  # fmt: skip
