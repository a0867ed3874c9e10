"""The sampling options. All that an option needs is here: its field, range, help text and effect on
logits.

A new option is a key of `SamplingOptions`, a field of `SamplingParams` and an entry of `OPTIONS`.
Everything that generates, on torch or XLA, files of prompts and the command line take it from
there. torch is not imported.

V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypedDict

from quantkit.base.arguments import as_integer, as_number, as_seed, wrong_type
from quantkit.errors import RequestError


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as keyword arguments of every function that generates."""

    temperature: float
    top_p: float
    seed: int | None
    top_k: int
    min_p: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    presence_penalty: float
    frequency_penalty: float


@dataclass(frozen=True)
class SamplingParams:
    """The sampling options: logits are biased and penalized, divided by the temperature, and the
    tokens are restricted by `top_k`, `top_p` and `min_p`, in this order.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_p: draw from the likeliest tokens, up to the one with which the sum of their
            probabilities exceeds this (nucleus sampling, 1904.09751).
        seed: of the random numbers; None is unpredictable. torch's global generator is not used.
        top_k: draw from the `top_k` likeliest tokens; 0 or -1 is all.
        min_p: draw from tokens with at least this share of the likeliest one's probability
            (2407.01082).
        repetition_penalty: logits of tokens that the text already contains are divided by it where
            positive, and multiplied where negative (1909.05858); 1 does nothing; 0.01 to 100.
        logit_bias: added to the logits of tokens, by token id; -10000 to 10000, of which 100 mostly
            forces or forbids a token.
        presence_penalty: subtracted from the logits of tokens that are among the new ones, as in
            OpenAI's API; -2 to 2.
        frequency_penalty: the same for each time that a token is among the new ones.

    Raises:
        RequestError: for a value of the wrong type or out of range, or a seed that does not fit 64
            bits.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = option.validate(option.name, getattr(self, option.name))
            # The class is frozen, but values are converted, such as a top_k of -1 to 0.
            object.__setattr__(self, option.name, value)

    @cached_property
    def active(self) -> tuple[Option, ...]:
        """List the options whose value differs from the default; the others have no effect."""
        active: list[Option] = []
        for option in OPTIONS:
            if getattr(self, option.name) != getattr(_DEFAULTS, option.name):
                active.append(option)
        return tuple(active)

    @cached_property
    def needs_seen_tokens(self) -> bool:
        """Tell whether an option depends on the tokens that the text already contains."""
        return any(option.past == "seen" for option in self.active)

    @cached_property
    def needs_counts(self) -> bool:
        """Tell whether an option depends on how often each token is among the new ones."""
        return any(option.past == "counts" for option in self.active)

    @cached_property
    def likeliest_only(self) -> bool:
        """Tell whether the next token is the one with the highest logit of the model."""
        # Without a temperature nothing random is drawn, so a seed has no effect.
        return all(option.name == "seed" for option in self.active)

    def require_vocabulary(self, size: int) -> None:
        """Raise `RequestError` if an option names a token that a vocabulary of this size does
        not have.
        """
        unknown: list[int] = []
        for token in self.logit_bias:
            if not 0 <= token < size:
                unknown.append(token)
        if unknown:
            raise RequestError(
                "logit_bias names tokens outside the vocabulary",
                # The first few: a mistake may concern all of the vocabulary.
                found=sorted(unknown)[:8],
                expected=f"0 to {size - 1}",
                argument="logit_bias",
            )


def _number(allowed: Callable[[float], bool], rule: str) -> Callable[[str, object], float]:
    """Create a function that converts and checks the number of an option."""

    def validate(name: str, value: object) -> float:
        number = as_number(name, value)
        if not allowed(number):
            raise RequestError(f"{name} must {rule}", found=number, argument=name)
        return number

    return validate


def _top_k(name: str, value: object) -> int:
    """Convert and check `top_k`, of which 0 keeps all tokens."""
    top_k = as_integer(name, value)
    # -1 keeps all tokens in vLLM and llama.cpp.
    if top_k == -1:
        return 0
    if top_k < 0:
        raise RequestError(f"{name} must not be negative", found=top_k, argument=name)
    return top_k


def _logit_bias(name: str, value: object) -> dict[int, float]:
    """Convert and check biases by token id."""
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "numbers by token ids")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        biases[as_integer(name, token)] = as_number(name, bias)
    for bias in biases.values():
        # Written so that NaN fails too.
        if not abs(bias) <= 10_000:
            raise RequestError(f"{name} must lie in [-10000, 10000]", found=bias, argument=name)
    return biases


def _add_bias(xp: Any, logits: Any, bias: Any, past: Any) -> Any:
    """Add a bias to logits: by token id, or as an array [V] if XLA runs the model."""
    # Compiled XLA steps take arrays, whose shapes do not depend on the request.
    if not isinstance(bias, Mapping):
        return logits + bias
    tokens = xp.tensor(list(bias), device=logits.device)
    values = xp.tensor(list(bias.values()), device=logits.device)
    return logits.index_add(-1, tokens, values.expand(len(logits), -1))


def _penalize(xp: Any, logits: Any, penalty: Any, seen_mask: Any) -> Any:
    """Apply the repetition penalty of 1909.05858."""
    # Division would raise a negative logit.
    penalized = xp.where(logits > 0, logits / penalty, logits * penalty)
    return xp.where(seen_mask, penalized, logits)


def _keep_top_k(probabilities: Any, top_k: int) -> Any:
    """Set all but the `top_k` highest probabilities to 0."""
    if top_k >= probabilities.shape[-1]:
        return probabilities
    ranked, order = probabilities.topk(top_k, dim=-1)
    return probabilities.new_zeros(probabilities.shape).scatter(-1, order, ranked)


def _keep_min_p(probabilities: Any, min_p: float) -> Any:
    """Set probabilities below the share `min_p` of the highest one to 0."""
    threshold = min_p * probabilities.amax(-1, keepdim=True)
    return probabilities.masked_fill(probabilities < threshold, 0)


@dataclass(frozen=True)
class Option:
    """A sampling option: its valid values and its effect.

    Attributes:
        name: of the field of `SamplingParams`.
        validate: the value that a name and an argument stand for; raises `RequestError`.
        help: on the command line.
        type: of its value on the command line; None if ``generate`` and ``chat`` do not both have
            it.
        adjust: changes logits. Called with ``torch`` or ``jax.numpy``, float32 logits [..., V], the
            value, and what `past` names, else None.
        past: what `adjust` uses: ``seen``, which tokens prompt and new text contain, bool [..., V];
            or ``counts``, how often the new text alone contains each, numbers [..., V].
        row: the value as an array [V] for XLA, given the vocabulary size; None if it is a number.
        drops: which tokens are not drawn. Called with ``torch`` or ``jax.numpy``, probabilities in
            falling order [..., V], their ranks from 0, and the value.
        keep: the same in torch without sorting: probabilities [..., V] with zeros for the tokens
            that are dropped.
    """

    name: str
    validate: Callable[[str, object], Any]
    help: str
    type: type | None = None
    adjust: Callable[[Any, Any, Any, Any], Any] | None = None
    past: Literal["seen", "counts"] | None = None
    row: Callable[[Any, int], list[float]] | None = None
    drops: Callable[[Any, Any, Any, Any], Any] | None = None
    keep: Callable[[Any, Any], Any] | None = None


# The bounds of options that change logits are wider than any use, but float32 does not overflow
# within them.
OPTIONS = (
    Option(
        "logit_bias",
        _logit_bias,
        "Add to the logits of a token.",
        adjust=_add_bias,
        row=lambda bias, vocab_size: [bias.get(token, 0.0) for token in range(vocab_size)],
    ),
    Option(
        "repetition_penalty",
        _number(lambda x: 0.01 <= x <= 100, "lie in [0.01, 100]"),
        "Lower the logits of tokens that the text already contains; 1 does nothing.",
        float,
        adjust=_penalize,
        past="seen",
    ),
    Option(
        "presence_penalty",
        _number(lambda x: -2 <= x <= 2, "lie in [-2, 2]"),
        "Subtract this from the logits of tokens that the new text contains.",
        float,
        adjust=lambda xp, logits, penalty, counts: logits - penalty * (counts > 0),
        past="counts",
    ),
    Option(
        "frequency_penalty",
        _number(lambda x: -2 <= x <= 2, "lie in [-2, 2]"),
        "Subtract this from the logits of tokens for each time that the new text contains them.",
        float,
        adjust=lambda xp, logits, penalty, counts: logits - penalty * counts,
        past="counts",
    ),
    Option(
        "temperature",
        _number(lambda x: 0 <= x < math.inf, "be finite and not negative"),
        "Sampling temperature; 0 takes the likeliest token.",
        float,
    ),
    Option(
        "top_k",
        _top_k,
        "Draw from the K likeliest tokens; 0 or -1 is all.",
        int,
        drops=lambda xp, ranked, rank, top_k: (top_k > 0) & (rank >= top_k),
        keep=_keep_top_k,
    ),
    Option(
        "top_p",
        _number(lambda x: 0 < x <= 1, "lie in (0, 1]"),
        "Draw from the likeliest tokens whose probabilities together exceed this.",
        float,
        drops=lambda xp, ranked, rank, top_p: (top_p < 1) & (ranked.cumsum(-1) - ranked > top_p),
    ),
    Option(
        "min_p",
        _number(lambda x: 0 <= x <= 1, "lie in [0, 1]"),
        "Draw from tokens with at least this share of the likeliest one's probability.",
        float,
        drops=lambda xp, ranked, rank, min_p: ranked < min_p * ranked[..., :1],
        keep=_keep_min_p,
    ),
    Option(
        "seed",
        lambda name, value: None if value is None else as_seed(name, value),
        "Seed of the random numbers; unpredictable by default.",
        int,
    ),
)
"""In the order in which they are applied."""

_DEFAULTS = SamplingParams()
