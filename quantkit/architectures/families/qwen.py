"""Qwen2 and Qwen3, and their mixtures of experts."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import EXPERT_KEYS, Family, GgufArchitecture
from quantkit.architectures.names import BLOCK
from quantkit.architectures.rope import SLIDING
from quantkit.base.json_values import Settings

_MAX_KEY = "max_window_layers"
# Of transformers, if the key is absent.
_MAX_WINDOW_LAYERS = 28


# Qwen2 and Qwen2.5 (2407.10671): biases of queries, keys and values; windows in some layers.
def _read_windows(settings: Settings) -> list[int | None]:
    """Read windows, if the config enables them, in the layers that it lists, or from a layer on."""
    layers = keys.layer_count(settings)
    types = keys.layer_types(settings, layers)
    window = keys.sliding_window(settings)
    if window is None or not settings.flag("use_sliding_window", False):
        return [None] * layers
    if types:
        windowed = [kind == SLIDING for kind in types]
    else:
        first = _MAX_WINDOW_LAYERS
        if settings.has(_MAX_KEY):
            first = settings.integer(_MAX_KEY, 0, Limits.context)
        windowed = [layer >= first for layer in range(layers)]
    windows: list[int | None] = []
    for has_window in windowed:
        windows.append(window if has_window else None)
    return windows


def _write(config: ModelConfig) -> dict[str, Any]:
    # Older readers only know the first layer with a window; `layer_types` also expresses others.
    first = config.num_layers
    for layer, window in enumerate(config.windows):
        if window is not None:
            first = layer
            break
    return {_MAX_KEY: first, "layer_types": keys.write_layer_types(config)}


_WINDOWS = keys.make_switched_window_keys(_read_windows, _write)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (_WINDOWS,),
    {"qkv_bias": True},
    gguf=GgufArchitecture("qwen2", biases=("qkv",)),
)


# Qwen2-MoE, Qwen1.5-MoE (2407.10671): Qwen2 with many small experts, and a shared one with a
# separate gate.
def _moe_windows(settings: Settings) -> list[int | None]:
    """Read windows in the layers that the config lists, or else in every other one up to a layer,
    as in transformers.
    """
    layers = keys.layer_count(settings)
    enabled = settings.flag("use_sliding_window", False)
    if settings.has(_MAX_KEY):
        last = settings.integer(_MAX_KEY, 0, Limits.context)
    else:
        last = _MAX_WINDOW_LAYERS
    windowed = [kind == SLIDING for kind in keys.layer_types(settings, layers)]
    if not windowed:
        for layer in range(layers):
            windowed.append(enabled and layer % 2 == 0 and layer < last)
    window = keys.sliding_window(settings) if enabled else None
    return keys.windows_of(settings, windowed, window)


_MOE_WINDOWS = keys.make_switched_window_keys(
    _moe_windows,
    lambda config: {_MAX_KEY: config.num_layers, "layer_types": keys.write_layer_types(config)},
)
QWEN2_MOE = Family(
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
    # The canonical name of the module has a plural, DeepSeek's.
    names={
        "shared_expert.gate": BLOCK + "mlp.shared_expert.gate_proj",
        "shared_expert.up": BLOCK + "mlp.shared_expert.up_proj",
        "shared_expert.down": BLOCK + "mlp.shared_expert.down_proj",
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
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (keys.ATTENTION_BIAS, _WINDOWS),
    {"head_dim_required": True, "qk_norm": "head"},
    gguf=GgufArchitecture("qwen3"),
)


# Qwen3-MoE (2505.09388): Qwen3 with many small experts, in all layers or some.
def _read_uniform_windows(settings: Settings) -> list[int | None]:
    window = None
    if settings.flag("use_sliding_window", False):
        window = keys.sliding_window(settings)
    return [window] * keys.layer_count(settings)


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        keys.ATTENTION_BIAS,
        keys.make_switched_window_keys(_read_uniform_windows, lambda config: {}),
        keys.experts(size_key="moe_intermediate_size", norm_key="norm_topk_prob"),
        keys.SPARSE_LAYERS,
    ),
    options={"qk_norm": "head"},
    gguf=GgufArchitecture("qwen3moe", keys=EXPERT_KEYS, normalized=True),
)
