"""How far a model is from its source by how far in a context a token lies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PositionDivergence:
    """How far a model's predictions are from a reference's at some positions of a context.

    Attributes:
        start, stop: the positions, from the first to before the last.
        tokens: compared there, in all windows.
        kl: mean of KL(reference || model) per token, in nats.
        kl_error: its standard error; None where there are too few tokens.
        top1_agreement: share of tokens whose likeliest next one is the same.
    """

    start: int
    stop: int
    tokens: int
    kl: float
    kl_error: float | None
    top1_agreement: float
