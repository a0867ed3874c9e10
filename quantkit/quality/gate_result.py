"""What the gate found, and how manifests record it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.quality.figures import Estimate, read_record

WINDOW = 256
"""Tokens in a window, or the model's context where that is shorter."""


@dataclass(frozen=True)
class TextResult:
    """The result compared with its source on one text.

    Attributes:
        text, sha256: its name and hash; for random tokens, the hash of the tokens.
        tokens: positions compared.
        kl, kl_p99: KL(source || result) per token in nats, mean and 99th percentile.
        kl_bound: the largest mean that passes.
        top1_agreement: share of positions with the same likeliest token.
        source_perplexity, perplexity: per token.
        kl_error, ratio_error: standard errors of the mean KL and of the ratio of perplexities; None
            in manifests of earlier versions, and for too few tokens.
        rounding_kl: the mean KL of the RTN baseline; None where no second model was run: the result
            is its own baseline and has no quantized KV cache, or the source is quantized. None also
            in manifests of earlier versions.
    """

    text: str
    sha256: str
    tokens: int
    kl: float
    kl_p99: float
    kl_bound: float
    top1_agreement: float
    source_perplexity: float
    perplexity: float
    kl_error: float | None = None
    ratio_error: float | None = None
    rounding_kl: float | None = None

    def __post_init__(self) -> None:
        if not self.source_perplexity > 0:
            raise ValueError("a perplexity must be positive")

    @property
    def kl_estimate(self) -> Estimate:
        """Return the mean KL with its standard error."""
        return Estimate(self.kl, self.kl_error)

    @property
    def perplexity_ratio(self) -> Estimate:
        """Return the result's perplexity over the source's, with its standard error."""
        return Estimate(self.perplexity / self.source_perplexity, self.ratio_error)

    def limit(self, digits: int = 3) -> str:
        """Describe the bound of the mean KL."""
        if self.rounding_kl is None:
            rounding = ""
        else:
            rounding = f"; rounding to nearest gives {self.rounding_kl:.{digits}g}"
        return f"at most {self.kl_bound:.{digits}g}{rounding}"


@dataclass(frozen=True)
class Gate:
    """The gate's findings.

    Attributes:
        texts: the measures, with as many digits as the manifest has.
        perplexity_ratio_bound: the largest ratio of perplexities that passes.
        fallbacks: layers that the solver could not solve, with the reason.
        distorted: layers whose weights changed more than their schemes explain, with the error and
            its bound.
        is_rounded: whether the weights are those of the RTN baseline; not in manifests.
    """

    texts: list[TextResult]
    perplexity_ratio_bound: float
    fallbacks: dict[str, str]
    distorted: dict[str, tuple[float, float]] = field(default_factory=dict)
    is_rounded: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not self.texts:
            raise ValueError("nothing was measured")

    def problem(self) -> tuple[str, str, str] | None:
        """Describe the problem, what was found and what was expected; None if the gate is passed.

        NaN exceeds every bound.
        """
        for text in self.texts:
            if not text.kl <= text.kl_bound:
                digits = _distinct_digits(text.kl, text.kl_bound)
                divergence = (
                    f"a mean KL(source || result) of {text.kl:.{digits}g} nats a token on"
                    f" '{text.text}'"
                )
                return "the result is too far from its source", divergence, text.limit(digits)
            ratio = text.perplexity_ratio.value
            if not ratio <= self.perplexity_ratio_bound:
                digits = _distinct_digits(ratio, self.perplexity_ratio_bound)
                increase = f"{ratio:.{digits}g} times the perplexity on '{text.text}'"
                allowed = f"at most {self.perplexity_ratio_bound:g} times"
                return "the result predicts worse than its source", increase, allowed
        # One layer is enough for a verdict: the manifest lists all.
        for linear, reason in self.fallbacks.items():
            return (
                f"linear '{linear}' was rounded to nearest",
                reason,
                "a linear that GPTQ can solve",
            )
        for linear, (error, bound) in self.distorted.items():
            problem = f"the weights of linear '{linear}' changed more than its scheme explains"
            change = f"an error of {error:.3g} relative to the weights (Frobenius norms)"
            return problem, change, f"at most {bound:.3g}"
        return None

    def to_json(self, *, accepted: bool = False) -> dict[str, Any]:
        """Return the manifest's form; `accepted` states whether the result is kept even if it does
        not pass.
        """
        return {
            "passed": self.problem() is None,
            "accepted": accepted,
            "window": WINDOW,
            "perplexity_ratio_bound": self.perplexity_ratio_bound,
            "fallbacks": self.fallbacks,
            **({"distorted": self.distorted} if self.distorted else {}),
            "texts": [asdict(text) for text in self.texts],
        }

    @classmethod
    def from_json(cls, value: Any, path: Path) -> Gate:
        """Read the result of `to_json` from the manifest at a path.

        Raises:
            CheckpointError: if it has another form, or states no text.
        """
        return read_record(cls, value, path, "what the model lost")


def _distinct_digits(value: float, bound: float) -> int:
    """Count the digits that a figure needs, at least three, to look different from its bound."""
    for digits in range(3, 17):
        if f"{value:.{digits}g}" != f"{bound:.{digits}g}":
            return digits
    # A float64 has no more than 17 significant digits.
    return 17
