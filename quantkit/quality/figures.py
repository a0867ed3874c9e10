"""Figures with their standard errors, and no more digits than these bear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_STRETCHES = 20  # an error from so many is itself known to a sixth
_SHORTEST = 16  # tokens of one
_LEAST_PLAIN = 1e-4
_MOST_PLAIN = 1e7
_TWO_DIGITS = 2.95  # an error that begins with less has two digits, another one


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error; None where that is not known.

    Spelled ``0.0123 ± 0.0004``; ``(1.23 ± 0.04)e-06`` where it is tiny or huge; ``0.0123`` without an error.
    """

    value: float
    error: float | None = None

    def __str__(self) -> str:
        error = self.error
        if not error or not math.isfinite(error) or not math.isfinite(self.value):
            return significant(self.value)
        exponent = math.floor(math.log10(max(abs(self.value), error)))
        if not _is_plain(exponent):
            return f"({_beside(self.value / 10.0**exponent, error / 10.0**exponent)})e{exponent:+03}"
        return _beside(self.value, error)

    def times(self, factor: float) -> Estimate:
        """The same in another unit, such as percent."""
        return Estimate(self.value * factor, None if self.error is None else self.error * factor)

    def exp(self) -> Estimate:
        """Of a mean of logarithms; infinite beyond the range of a float."""
        value = math.exp(self.value) if self.value < 709 else math.inf
        return Estimate(value, None if self.error is None else value * self.error)


def significant(value: float, digits: int = 3) -> str:
    """A figure with so many digits that count; those before the point are all shown, of seven at most."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if not _is_plain(exponent):
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def _is_plain(exponent: int) -> bool:
    return _LEAST_PLAIN <= 10.0**exponent < _MOST_PLAIN


def weighted_mean(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Of figures of texts that have nothing to do with each other; it has an error if all of them have."""
    shares = [weight / sum(weights) for weight in weights]
    value = sum(share * one.value for share, one in zip(shares, estimates, strict=True))
    errors = [share * one.error for share, one in zip(shares, estimates, strict=True) if one.error is not None]
    return Estimate(value, math.hypot(*errors) if len(errors) == len(estimates) else None)


def mean_estimate(values: Tensor) -> Estimate:
    """The mean over a text's tokens [N], float64 and in their order, with its standard error.

    Neighbouring tokens, windows and paragraphs are alike, so that the error is not that of N independent draws: the
    text is cut into 20 stretches of equal length, of at least 16 tokens, and these are what is taken as independent
    (batch means; Schmeiser, Operations Research 30, 1982). One stretch alone has no error.
    """
    mean = values.mean()
    count = min(_STRETCHES, len(values) // _SHORTEST)
    if count < 2:
        return Estimate(mean.item())
    spread = sum((part - mean).sum().square() for part in values.tensor_split(count))
    return Estimate(mean.item(), math.sqrt(spread * count / (count - 1)) / len(values))


def _beside(value: float, error: float) -> str:
    """Both with as many decimals as the error has digits that count."""
    exponent = math.floor(math.log10(error))
    decimals = (1 if error / 10.0**exponent < _TWO_DIGITS else 0) - exponent
    shown = [round(one, decimals) + 0.0 for one in (value, error)]
    return " ± ".join(f"{one:.{max(0, decimals)}f}" for one in shown)
