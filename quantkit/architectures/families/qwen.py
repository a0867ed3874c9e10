"""Qwen2 and Qwen3, and their mixtures of experts."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import EXPERT_KEYS, Family, GgufArchitecture
from quantkit.architectures.names import BLOCK
from quantkit.architectures.rope import SLIDING
from quantkit.base.json_values import Settings

# of transformers, if the key is absent
_MAX_KEY = "max_window_layers"
_MAX_WINDOW_LAYERS = 28


# Qwen2 and Qwen2.5 (2407.10671): biases of queries, keys and values; windows in some layers.
def _windows(settings: Settings) -> list[int | None]:
    """Windows, if the config enables them, in the layers that it lists, or from a layer on."""
    layers = keys.layer_count(settings)
    types = keys.layer_types(settings, layers)
    window = keys.sliding_window(settings)
    if window is None or not settings.flag("use_sliding_window", False):
        return [None] * layers
    stated = settings.has(_MAX_KEY) and not types
    if stated:
        first = settings.integer(_MAX_KEY, 0, Limits.context)
    else:
        first = _MAX_WINDOW_LAYERS
    windowed = [kind == SLIDING for kind in types] or [layer >= first for layer in range(layers)]
    windows: list[int | None] = []
    for has_window in windowed:
        windows.append(window if has_window else None)
    return windows


def _write(config: ModelConfig) -> dict[str, Any]:
    first = next(
        (i for i, window in enumerate(config.windows) if window is not None), config.num_layers
    )
    return {_MAX_KEY: first, "layer_types": keys.write_layer_types(config)}


_WINDOWS = keys.make_switched_window_keys(_windows, _write)
_QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (_WINDOWS,),
    {"qkv_bias": True},
    gguf=GgufArchitecture("qwen2", biases=("qkv",)),
)


# Qwen2-MoE, Qwen1.5-MoE (2407.10671): Qwen2 with many small experts, and a shared one with a
# separate gate.
def _moe_windows(settings: Settings) -> list[int | None]:
    """Windows in the layers that the config lists, or else in every other one up to a layer, as
    in transformers.
    """
    layers = keys.layer_count(settings)
    enabled = settings.flag("use_sliding_window", False)
    if settings.has(_MAX_KEY):
        last = settings.integer(_MAX_KEY, 0, Limits.context)
    else:
        last = _MAX_WINDOW_LAYERS
    windowed = [kind == SLIDING for kind in keys.layer_types(settings, layers)] or [
        enabled and layer % 2 == 0 and layer < last for layer in range(layers)
    ]
    return keys.windows_of(settings, windowed, keys.sliding_window(settings) if enabled else None)


_MOE_WINDOWS = keys.make_switched_window_keys(
    _moe_windows,
    lambda config: {_MAX_KEY: config.num_layers, "layer_types": keys.write_layer_types(config)},
)
_QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        keys.flag("qkv_bias", "qkv_bias", default=True),
        _MOE_WINDOWS,
        keys.experts(
            size_key="moe_intermediate_size",
            shared_key="shared_expert_intermediate_size",
            norm_key="norm_topk_prob",
            shared_gate=True,
        ),
        keys.SPARSE_LAYERS,
    ),
    names={
        f"shared_expert.{part}": f"{BLOCK}mlp.shared_expert.{part}_proj"
        for part in ("gate", "up", "down")
    },
    gguf=GgufArchitecture(
        "qwen2moe",
        keys=(*EXPERT_KEYS, "expert_shared_feed_forward_length"),
        biases=("qkv",),
        normalized=False,
        tied=False,
    ),
)

# Qwen3, dense (2505.09388): norms of each head's queries and keys, an independent head size.
_QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (keys.ATTENTION_BIAS, _WINDOWS),
    {"head_dim_required": True, "qk_norm": "head"},
    gguf=GgufArchitecture("qwen3"),
)


# Qwen3-MoE (2505.09388): Qwen3 with many small experts, in all layers or some.
def _every_window(settings: Settings) -> list[int | None]:
    if settings.flag("use_sliding_window", False):
        window = keys.sliding_window(settings)
    else:
        window = None
    return [window] * keys.layer_count(settings)


_QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        keys.ATTENTION_BIAS,
        keys.make_switched_window_keys(_every_window, lambda config: {}),
        keys.experts(size_key="moe_intermediate_size", norm_key="norm_topk_prob"),
        keys.SPARSE_LAYERS,
    ),
    options={"qk_norm": "head"},
    gguf=GgufArchitecture("qwen3moe", keys=EXPERT_KEYS, normalized=True),
)

FAMILIES = (_QWEN2, _QWEN2_MOE, _QWEN3, _QWEN3_MOE)
