"""Mistral (2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from quantkit.architectures.families.family import Family
from quantkit.architectures.families.keys import DEFAULT_WINDOW, Keys, layer_count, layer_types, one_window
from quantkit.architectures.families.llama import GGUF
from quantkit.architectures.rope import FULL
from quantkit.errors import UnsupportedError
from quantkit.json_values import Settings

_WINDOW = one_window(DEFAULT_WINDOW)


def _read(settings: Settings) -> dict[str, Any]:
    found = _WINDOW.read(settings)
    if FULL in layer_types(settings, layer_count(settings)) and found["windows"][0] is not None:
        raise UnsupportedError("mixed attention layers in a Mistral model are not supported", path=settings.path)
    return found


FAMILY = Family(
    "mistral", "MistralForCausalLM", (Keys(_read, _WINDOW.write),), gguf=GGUF, gguf_mark="sliding_window"
)  # fmt: skip
