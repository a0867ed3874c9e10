"""Models in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def build_model(
    name: str, *, created: int, context: int, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a model with the keys of OpenAI's API, vLLM and quantkit.

    Args:
        created: in seconds since 1970.
        context: tokens of a sequence.
        about: what the model's folder states about it.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quantkit",
        "max_model_len": context,
        "quantkit": about,
    }


def build_model_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the list of all models that are served."""
    return {"object": "list", "data": list(models)}
