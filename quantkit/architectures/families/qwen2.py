"""Qwen2 and Qwen2.5 (2407.10671): biases on queries, keys and values; a window in some layers."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import MAX_CONTEXT, LayerConfig, ModelConfig
from quantkit.architectures.families.family import (
    Family,
    layer_count,
    layer_types,
    only_window,
    read_config,
    sliding_window,
    windowed,
    written_layer_types,
)
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.json_values import Settings

_FIRST_WINDOW_LAYER = 28  # of transformers, where the key is absent


def _read(settings: Settings) -> ModelConfig:
    return read_config(settings, qwen_layers(settings), qkv_bias=True)


def qwen_layers(settings: Settings) -> list[LayerConfig]:
    """Windows where the config switches them on: in the layers that it lists, or from one layer on."""
    layers = layer_count(settings)
    types = layer_types(settings, layers)
    window = sliding_window(settings)
    if window is None or not settings.flag("use_sliding_window", False):
        return [LayerConfig()] * layers
    if types:
        return windowed(types, window)
    key = "max_window_layers"
    first = settings.whole(key, 0, MAX_CONTEXT) if settings.has(key) else _FIRST_WINDOW_LAYER
    return [LayerConfig(window=window if layer >= first else None) for layer in range(layers)]


def write_qwen_layers(config: ModelConfig) -> dict[str, Any]:
    """The keys that `qwen_layers` reads."""
    first = next((i for i, window in enumerate(config.windows) if window is not None), config.num_layers)
    width = only_window(config)
    return {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": first,
        "layer_types": written_layer_types(config),
    }


FAMILY = Family("qwen2", "Qwen2ForCausalLM", _read, write_qwen_layers, gguf=GgufArchitecture("qwen2", biases=("qkv",)))
