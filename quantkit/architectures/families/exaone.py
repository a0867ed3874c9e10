"""EXAONE 4 (2507.11407): norms after both branches, and of each head's queries and keys; only
layers with a window have rotary positions.

Its description is the code of transformers.
"""

from __future__ import annotations

from typing import Any

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import keys
from quantkit.architectures.families.family import Family
from quantkit.architectures.families.keys import Keys
from quantkit.architectures.names import BLOCK
from quantkit.base.json_values import Settings

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
)
