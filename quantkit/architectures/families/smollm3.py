"""SmolLM3: Llama with layers without rotary positions (2501.18795), every fourth unless the config lists them."""

from __future__ import annotations

from quantkit.architectures.config import MAX_LAYERS
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.gguf_architecture import GgufArchitecture
from quantkit.architectures.families.keys import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Keys,
    layer_count,
    layer_types,
    sliding_window,
    switched_windows,
    windows_of,
    written_layer_types,
)
from quantkit.architectures.rope import SLIDING
from quantkit.errors import CheckpointError
from quantkit.json_values import Settings, shown

_INTERVAL = 4


def _windows(settings: Settings) -> list[int | None]:
    count = layer_count(settings)
    enabled = settings.flag("use_sliding_window", False)
    windowed = [kind == SLIDING for kind in layer_types(settings, count)]
    window = sliding_window(settings, None)
    if not windowed:  # otherwise the flag has no effect, as in transformers
        windowed = [enabled and window is not None and not rotated for rotated in _rotary(settings, count)]
    return windows_of(settings, windowed, window)


def _rotary(settings: Settings, count: int) -> list[bool]:
    """Whether each layer has rotary positions: 1 in ``no_rope_layers``, in spite of its name."""
    key = "no_rope_layers"
    if not settings.has(key):
        interval_key = "no_rope_layer_interval"
        interval = settings.integer(interval_key, 1, MAX_LAYERS) if settings.has(interval_key) else _INTERVAL
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


_ROTARY = Keys(
    lambda settings: {"rotary": _rotary(settings, layer_count(settings))},
    lambda config: {"no_rope_layers": [int(layer.rotary) for layer in config.layers]},
)
_WINDOWS = switched_windows(_windows, lambda config: {"layer_types": written_layer_types(config)})
FAMILY = Family(
    "smollm3", "SmolLM3ForCausalLM", (ATTENTION_BIAS, MLP_BIAS, _ROTARY, _WINDOWS),
    options={"tied_by_default": True, "default_theta": 2e6},
    gguf=GgufArchitecture(
        "smollm3", interleaved_rotary=True,
        read=lambda keys, head_dim: {"no_rope_layer_interval": _INTERVAL},  # llama.cpp has no key for it
    ),
)  # fmt: skip
