"""How tokens are drawn, as it is asked for; without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from quantkit.arguments import as_number, as_seed, as_whole, wrong_type
from quantkit.errors import RequestError


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as arguments of what generates."""

    temperature: float
    top_p: float
    seed: int | None
    top_k: int
    min_p: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn: logits are biased and penalized, divided by the temperature, and cut by `top_k`,
    `top_p` and `min_p`, in this order.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_p: draw from the likeliest tokens, up to the one with which their probabilities together exceed this
            (nucleus sampling, 1904.09751).
        seed: of the draw; None is unpredictable. torch's global generator is not used.
        top_k: draw from so many of the likeliest tokens; 0 is all.
        min_p: draw from tokens with at least this share of the likeliest one's probability (2407.01082).
        repetition_penalty: logits of tokens that the text holds already are divided by it where positive, and
            multiplied where negative (1909.05858); 1 does nothing; 0.01 to 100.
        logit_bias: what is added to the logits of tokens, by their ids; -10000 to 10000, of which 100 mostly forces or
            forbids a token.

    Raises:
        RequestError: for a value of another type or out of its range, or a seed that does not fit 64 bits.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, right, rule in _NUMBERS:
            value = as_number(name, getattr(self, name))
            if not right(value):
                raise RequestError(f"{name} must {rule}", found=value)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "top_k", as_whole("top_k", self.top_k))
        if self.top_k < 0:
            raise RequestError("top_k must not be negative", found=self.top_k)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.seed is not None:
            object.__setattr__(self, "seed", as_seed("seed", self.seed))


# What logits are changed by goes beyond any use, but not so far that float32 would overflow.
_NUMBERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda x: 0 <= x < math.inf, "be finite and not negative"),
    ("top_p", lambda x: 0 < x <= 1, "lie in (0, 1]"),
    ("min_p", lambda x: 0 <= x <= 1, "lie in [0, 1]"),
    ("repetition_penalty", lambda x: 0.01 <= x <= 100, "lie in [0.01, 100]"),
)


def _checked_bias(given: object) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise wrong_type("logit_bias", given, "numbers by token ids")
    found = {as_whole("logit_bias", token): as_number("logit_bias", bias) for token, bias in given.items()}
    if wrong := [bias for bias in found.values() if not abs(bias) <= 10_000]:
        raise RequestError("logit_bias must lie in [-10000, 10000]", found=wrong[0])
    return found
