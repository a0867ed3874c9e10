"""Qwen2-MoE, Qwen1.5-MoE (2407.10671): Qwen2 with many small experts, and a shared one behind a gate of its own."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import MAX_CONTEXT, MAX_WIDTH, LayerConfig, ModelConfig
from quantkit.architectures.families.experts import experts_of, read_experts, sparse_layers, written_sparse_layers
from quantkit.architectures.families.family import (
    Family,
    layer_count,
    layer_types,
    only_window,
    read_config,
    sliding_window,
    written_layer_types,
)
from quantkit.architectures.families.gguf_architecture import EXPERT_KEYS, GgufArchitecture
from quantkit.architectures.names import BLOCK
from quantkit.errors import CheckpointError
from quantkit.json_values import Settings

_SHARED = BLOCK + "mlp.shared_expert."
_LAST_WINDOW_LAYER = 28  # of transformers, where the key is absent


def _read(settings: Settings) -> ModelConfig:
    sparse = sparse_layers(settings)
    experts = read_experts(
        settings, "moe_intermediate_size", normalized=settings.flag("norm_topk_prob", False),
        shared_size=settings.whole("shared_expert_intermediate_size", 1, MAX_WIDTH), shared_gate=True,
    )  # fmt: skip
    layers = [
        LayerConfig(window=window, experts=one) for window, one in zip(_windows(settings), sparse, strict=True)
    ]  # fmt: skip
    return read_config(settings, layers, qkv_bias=settings.flag("qkv_bias", True), experts=experts)


def _windows(settings: Settings) -> list[int | None]:
    """The window of each layer: where the config lists none, of every other one up to a layer, as in transformers."""
    layers, key = layer_count(settings), "max_window_layers"
    windowed = settings.flag("use_sliding_window", False)
    window = sliding_window(settings) if windowed else None
    last = settings.whole(key, 0, MAX_CONTEXT) if settings.has(key) else _LAST_WINDOW_LAYER
    slides = [kind == "sliding_attention" for kind in layer_types(settings, layers)] or [
        windowed and layer % 2 == 0 and layer < last for layer in range(layers)
    ]
    if window is None and any(slides):
        raise CheckpointError("some layers have windows, and sliding_window none", path=settings.path)
    return [window if slid else None for slid in slides]


def _write(config: ModelConfig) -> dict[str, Any]:
    experts, window = experts_of(config), only_window(config)
    return {
        "qkv_bias": config.qkv_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.num_layers,
        "layer_types": written_layer_types(config),
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "shared_expert_intermediate_size": experts.shared_size,
        "norm_topk_prob": experts.normalized,
        **written_sparse_layers(config),
    }


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _read,
    _write,
    names={f"shared_expert.{part}": f"{_SHARED}{part}_proj" for part in ("gate", "up", "down")},
    gguf=GgufArchitecture(
        "qwen2moe", keys=(*EXPERT_KEYS, "expert_shared_feed_forward_length"), biases=("qkv",), normalized=False,
        tied=False,
    ),
)  # fmt: skip
