"""Mistral (2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.families.family import Family, layer_count, layer_types, read_config, sliding_window
from quantkit.architectures.families.llama import GGUF
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings


def _read(settings: Settings) -> ModelConfig:
    layers = layer_count(settings)
    types = layer_types(settings, layers)
    window = sliding_window(settings)
    if window is not None and "full_attention" in types:
        raise UnsupportedError("mixed attention layers in a Mistral model are not supported", path=settings.path)
    return read_config(settings, [LayerConfig(window=window)] * layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.windows[0]}


FAMILY = Family("mistral", "MistralForCausalLM", _read, _write, gguf=GGUF, gguf_mark="sliding_window")
