"""SmolLM3: Llama with layers without rotary positions (2501.18795), every fourth unless the config lists them."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import MAX_LAYERS, LayerConfig, ModelConfig
from quantkit.architectures.families.family import (
    Family,
    layer_count,
    layer_types,
    only_window,
    read_config,
    sliding_window,
    written_layer_types,
)
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.errors import CheckpointError
from quantkit.json_values import Settings, shown

_INTERVAL = 4
_THETA = 2e6


def _read(settings: Settings) -> ModelConfig:
    bias = settings.flag("attention_bias", False)
    return read_config(
        settings, _layers(settings), tied_by_default=True, default_theta=_THETA, qkv_bias=bias, output_bias=bias,
        mlp_bias=settings.flag("mlp_bias", False),
    )  # fmt: skip


def _layers(settings: Settings) -> list[LayerConfig]:
    count = layer_count(settings)
    rotary = _rotary(settings, count)
    window = sliding_window(settings, None)
    windowed = settings.flag("use_sliding_window", False)
    types = layer_types(settings, count)  # where they are listed the flag says nothing, as in transformers
    if window is None and "sliding_attention" in types:
        raise CheckpointError("layer_types has windows, and sliding_window none", path=settings.path)
    slides = [kind == "sliding_attention" for kind in types] or [windowed and not rotated for rotated in rotary]
    return [
        LayerConfig(window=window if slid else None, rotary=rotated)
        for slid, rotated in zip(slides, rotary, strict=True)
    ]


def _rotary(settings: Settings, count: int) -> list[bool]:
    """Whether each layer rotates queries and keys: 1 in ``no_rope_layers``, whose name says the opposite."""
    key = "no_rope_layers"
    if not settings.has(key):
        interval_key = "no_rope_layer_interval"
        interval = settings.whole(interval_key, 1, MAX_LAYERS) if settings.has(interval_key) else _INTERVAL
        return [(layer + 1) % interval != 0 for layer in range(count)]
    stated = settings.need(key)
    if (
        not isinstance(stated, list)
        or len(stated) < count
        or not all(type(one) is int and one in (0, 1) for one in stated)
    ):
        raise CheckpointError(
            f"{key} does not fit the layers", path=settings.path, found=shown(stated),
            expected=f"0 or 1 for each of {count}",
        )  # fmt: skip
    return [rotated == 1 for rotated in stated[:count]]


def _write(config: ModelConfig) -> dict[str, Any]:
    window = only_window(config)
    return {
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(layer.rotary) for layer in config.layers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": written_layer_types(config),
    }


GGUF = GgufArchitecture(
    "smollm3", interleaved_rotary=True,
    read=lambda keys, head_dim: {"no_rope_layer_interval": _INTERVAL},  # llama.cpp has no key for it
)  # fmt: skip
FAMILY = Family("smollm3", "SmolLM3ForCausalLM", _read, _write, gguf=GGUF)
