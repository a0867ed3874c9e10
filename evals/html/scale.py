"""Colours in steps: what a value's step is, and the legend that says so."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.evals.html.elements import Markup, element

STEPS = 8
_WIDE = 20  # factors between the least and the largest
_ALIKE = 2
_OF_A_DECADE = (1, 2, 5)


@dataclass(frozen=True)
class Scale:
    """Steps of colour, 1 to `STEPS`; 0 is what lies below all.

    Attributes:
        limits: where each step begins, ascending.
    """

    limits: tuple[float, ...]

    def step(self, value: float) -> int:
        """Which colour a value has."""
        return sum(value >= limit for limit in self.limits)

    def legend(self, label: str, factor: float = 1) -> Markup:
        """The colours with the values at which they begin.

        Args:
            factor: to the unit of the label.
        """
        steps = [
            element("span", {"class": f"k{index}"}, f"{factor * limit:.3g}")
            for index, limit in enumerate(self.limits, 1)
        ]
        return element("p", {"class": "legend"}, element("span", {"class": "label"}, label), *steps)


def logarithmic(values: Iterable[float]) -> Scale:
    """Steps at 1, 2 and 5 of a decade, down from the largest value."""
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    top = 0
    if most > 0:
        decade = math.floor(math.log10(most))
        top = 3 * decade + sum(most > factor * 10.0**decade for factor in _OF_A_DECADE) - 1
    thirds = range(top - STEPS + 1, top + 1)
    return Scale(tuple(_OF_A_DECADE[third % 3] * 10.0 ** (third // 3) for third in thirds))


def for_errors(values: Iterable[float]) -> Scale:
    """Equal steps over all values, which lie in the middle where they are alike; logarithmic where far apart."""
    found = [value for value in values if math.isfinite(value) and value > 0]
    if not found or max(found) > _WIDE * min(found):
        return logarithmic(found)
    low, high = min(found), max(found)
    if high < _ALIKE * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(_ALIKE), middle * math.sqrt(_ALIKE)
    width = _round_up((high - low) / STEPS)
    first = math.floor(low / width)
    return Scale(tuple(width * (first + index) for index in range(STEPS)))


def _round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8 in its decade."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))
