"""Qwen2-MoE, Qwen1.5-MoE (2407.10671): Qwen2 with many small experts, and a shared one with a separate gate."""

from __future__ import annotations

from quantkit.architectures.config import MAX_CONTEXT
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import EXPERT_KEYS, GgufArchitecture
from quantkit.architectures.families.keys import (
    SPARSE_LAYERS,
    experts,
    flag,
    layer_count,
    layer_types,
    sliding_window,
    switched_windows,
    windows_of,
    written_layer_types,
)
from quantkit.architectures.names import BLOCK
from quantkit.architectures.rope import SLIDING
from quantkit.json_values import Settings

_SHARED = BLOCK + "mlp.shared_expert."
_LAST_WINDOW_LAYER = 28  # of transformers, if the key is absent


def _windows(settings: Settings) -> list[int | None]:
    """Windows in the layers that the config lists, or else in every other one up to a layer, as in transformers."""
    layers, key = layer_count(settings), "max_window_layers"
    enabled = settings.flag("use_sliding_window", False)
    last = settings.integer(key, 0, MAX_CONTEXT) if settings.has(key) else _LAST_WINDOW_LAYER
    windowed = [kind == SLIDING for kind in layer_types(settings, layers)] or [
        enabled and layer % 2 == 0 and layer < last for layer in range(layers)
    ]
    return windows_of(settings, windowed, sliding_window(settings) if enabled else None)


_WINDOWS = switched_windows(
    _windows,
    lambda config: {"max_window_layers": config.num_layers, "layer_types": written_layer_types(config)},
)
FAMILY = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM",
    (
        flag("qkv_bias", "qkv_bias", default=True), _WINDOWS,
        experts(
            size_key="moe_intermediate_size", shared_key="shared_expert_intermediate_size", norm_key="norm_topk_prob",
            shared_gate=True,
        ),
        SPARSE_LAYERS,
    ),
    names={f"shared_expert.{part}": f"{_SHARED}{part}_proj" for part in ("gate", "up", "down")},
    gguf=GgufArchitecture(
        "qwen2moe", keys=(*EXPERT_KEYS, "expert_shared_feed_forward_length"), biases=("qkv",), normalized=False,
        tied=False,
    ),
)  # fmt: skip
