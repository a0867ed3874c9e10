"""OLMo 3 (2512.13961): OLMo 2 with windows in three of four layers, whose rotary positions are not scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantkit.architectures.families import olmo2
from quantkit.architectures.families.keys import LAYER_ROPES, Keys, windows_by_kind
from quantkit.architectures.rope import MAX_THETA, MIN_THETA, SLIDING
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

_THETA = 500000.0
_WINDOWS = windows_by_kind(4)


def _read(settings: Settings) -> dict[str, Any]:
    """The windows of layers.

    Raises:
        UnsupportedError: for a rotary base that some readers use for all layers, and transformers for those without a
            window.
    """
    found = _WINDOWS.read(settings)
    kinds = settings.inside("rope_parameters") if settings.has("rope_parameters") else settings
    stated = kinds.has(SLIDING) and kinds.inside(SLIDING).has("rope_theta")
    ambiguous = any(found["windows"]) and settings.has("rope_theta") and not stated
    if ambiguous and settings.number("rope_theta", MIN_THETA, MAX_THETA) != _THETA:
        raise UnsupportedError(
            "readers differ on the rotary base of layers with a window", path=settings.path,
            found=f"rope_theta {settings.values['rope_theta']}", expected="rope_parameters by kind of layer",
        )  # fmt: skip
    return found


FAMILY = replace(
    olmo2.FAMILY, model_type="olmo3", class_name="Olmo3ForCausalLM",
    keys=(*olmo2.FAMILY.keys, LAYER_ROPES, Keys(_read, _WINDOWS.write)),
    options={**olmo2.FAMILY.options, "default_theta": _THETA, "windowed_theta": ("rope_theta", _THETA)},
    rope_by_layer=True, gguf_mark="sliding_window",
)  # fmt: skip
