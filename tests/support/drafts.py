"""Continuing a prompt with the help of proposals."""

from __future__ import annotations

from typing import Any

from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate


def speculate(
    model: Decoder,
    draft: Decoder | None,
    ids: list[int],
    *,
    max_new_tokens: int = 100,
    draft_tokens: int | None = None,
    **sampling: Any,
) -> list[int]:
    """The new tokens of a prompt with a draft model, or without one by prompt lookup."""
    engine = Engine(
        model, len(ids) + max_new_tokens, compiled=False, draft=draft, draft_tokens=draft_tokens
    )
    return list(generate(engine, ids, max_new_tokens=max_new_tokens, **sampling))
