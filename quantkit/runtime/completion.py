"""What comes of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
"""An end token or stop string, or the maximum number of new tokens."""


@dataclass
class Logprobs:
    """Natural logarithms of probabilities, as the model gives them before any sampling option.

    Attributes:
        tokens: of each token; None for the first of a prompt, which follows nothing.
        top: the likeliest tokens in the place of each, by id, the likeliest first.
    """

    tokens: list[float | None] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)

    def add(self, tokens: Sequence[float | None], top: Sequence[dict[int, float]]) -> None:
        self.tokens += tokens
        self.top += top

    def cut(self, count: int) -> Logprobs:
        """The log-probabilities of the first `count` tokens."""
        return Logprobs(self.tokens[:count], self.top[:count])


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
        prompt: the number of the prompt, from 0.
        sample: the number of the continuation among those of the prompt, from 0.
        token_ids: new tokens, without an end token; after the prompt's, where that is echoed.
        text: the same as text, without what a stop string cut off; None without a tokenizer.
        finish_reason: ``stop`` for an end token or a stop string, ``length`` for the maximum number of new tokens.
        stop: the stop string that was found.
        prompt_tokens: of the prompt.
        logprobs: of `token_ids`, if requested.
    """

    prompt: int
    sample: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    stop: str | None
    prompt_tokens: int
    logprobs: Logprobs | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values; log-probabilities only if requested."""
        found: dict[str, Any] = {
            "prompt": self.prompt, "sample": self.sample, "text": self.text, "finish_reason": self.finish_reason,
            "stop": self.stop, "prompt_tokens": self.prompt_tokens, "token_ids": self.token_ids,
        }  # fmt: skip
        if self.logprobs is not None:
            top = [[[token, value] for token, value in one.items()] for one in self.logprobs.top]
            found["logprobs"] = {"tokens": self.logprobs.tokens, "top": top}
        return found
