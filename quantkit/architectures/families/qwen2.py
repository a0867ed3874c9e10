"""Qwen2 and Qwen2.5 (2407.10671): biases of queries, keys and values; windows in some layers."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import MAX_CONTEXT, ModelConfig
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.keys import (
    Keys,
    layer_count,
    layer_types,
    only_window,
    sliding_window,
    written_layer_types,
)
from quantkit.architectures.rope import SLIDING
from quantkit.json_values import Settings

_FIRST_WINDOW_LAYER = 28  # of transformers, if the key is absent


def _read_windows(settings: Settings) -> dict[str, Any]:
    """Windows, if the config enables them, in the layers that it lists, or from a layer on."""
    layers = layer_count(settings)
    types = layer_types(settings, layers)
    window = sliding_window(settings)
    if window is None or not settings.flag("use_sliding_window", False):
        return {}
    key = "max_window_layers"
    first = settings.whole(key, 0, MAX_CONTEXT) if settings.has(key) and not types else _FIRST_WINDOW_LAYER
    windowed = [kind == SLIDING for kind in types] or [layer >= first for layer in range(layers)]
    return {"windows": [window if has_window else None for has_window in windowed]}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    width = only_window(config)
    return {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": next((i for i, one in enumerate(config.windows) if one is not None), config.num_layers),
        "layer_types": written_layer_types(config),
    }


WINDOWS = Keys(_read_windows, _write_windows)
FAMILY = Family(
    "qwen2", "Qwen2ForCausalLM", (WINDOWS,), {"qkv_bias": True}, gguf=GgufArchitecture("qwen2", biases=("qkv",))
)  # fmt: skip
