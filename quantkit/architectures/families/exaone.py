"""EXAONE 4 (2507.11407): norms after both branches, and of each head's queries and keys; only
layers with a window have rotary positions.

Its description is the code of transformers.
"""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import Limits, ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import Family, GgufArchitecture
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.names import BLOCK
from quantkit.base.json_values import Settings, format_value
from quantkit.errors import UnsupportedError

_PATTERN = "sliding_window_pattern"
_WINDOWS = keys.windows_by_kind(4, _PATTERN)


def _prepare(settings: Settings) -> Settings:
    """Drop the pattern of windows, which may be a string of letters, if the layers are listed."""
    values = dict(settings.values)
    if settings.has("layer_types"):
        values.pop(_PATTERN, None)
    return Settings(values, settings.path)


def _read_windows(settings: Settings) -> dict[str, Any]:
    """Read the windows of the layers, and which of them have rotary positions."""
    has_window = keys.sliding_window(settings) is not None
    if not has_window:
        # transformers divides by a pattern of 0 to list them.
        settings.need("layer_types")
    values = _WINDOWS.read(settings)
    # In a model without a window, all layers have rotary positions.
    rotary = [not has_window or window is not None for window in values["windows"]]
    return {**values, "rotary": rotary}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    values = _WINDOWS.write(config)
    if keys.only_window(config) is None and config.layers[0].rotary:
        # A width would take the rotary positions away.
        values["sliding_window"] = None
    return values


# The layers of the published model with windows; llama.cpp knows it by them.
_WINDOWED_LAYERS = 64


def _read_gguf(gguf: Settings, head_dim: int) -> dict[str, Any]:
    # llama.cpp ignores windows of other models, and rotates the positions of all layers.
    window = "attention.sliding_window"
    layers = gguf.integer("block_count", 1, Limits.layers)
    if gguf.values.get(window) and layers != _WINDOWED_LAYERS:
        raise UnsupportedError(
            f"llama.cpp does not support sliding windows in {gguf.name} models of {layers} layers",
            path=gguf.path,
            found=f"{window} {format_value(gguf.values[window])}",
        )
    return {}


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    (Keys(_read_windows, _write_windows),),
    options={"norms": "after", "qk_norm": "head"},
    prepare=_prepare,
    names={
        "attention.output_norm": BLOCK + "post_attention_layernorm",
        "mlp.output_norm": BLOCK + "post_feedforward_layernorm",
    },
    gguf=GgufArchitecture(
        "exaone4",
        rope_freqs=True,
        window_period=4,
        full_width=True,
        read=_read_gguf,
        refused={
            f"sliding windows with other than {_WINDOWED_LAYERS} layers": lambda config: (
                keys.only_window(config) is not None and config.num_layers != _WINDOWED_LAYERS
            ),
            f"the absence of sliding-window layers among {_WINDOWED_LAYERS}": lambda config: (
                keys.only_window(config) is None and config.num_layers == _WINDOWED_LAYERS
            ),
            "layers without rotary positions in models without windows": lambda config: (
                keys.only_window(config) is None and not config.layers[0].rotary
            ),
        },
    ),
)
