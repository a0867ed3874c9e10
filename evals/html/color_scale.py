"""Color scales in steps, at round values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

STEPS = 8
_LOG_RATIO = 20  # of the largest to the smallest value: beyond it steps are logarithmic
_MIN_RATIO = 2  # closer values take colors from the middle of the scale
_DECADE = (1, 2, 5)


@dataclass(frozen=True)
class ColorScale:
    """Colors 1 to `STEPS`; values below all limits have color 0.

    Attributes:
        limits: where each color begins, ascending.
    """

    limits: tuple[float, ...]

    def color(self, value: float) -> int:
        """The color of a value."""
        return sum(value >= limit for limit in self.limits)


def log_scale(values: Iterable[float]) -> ColorScale:
    """Steps at 1, 2 and 5 of each decade, downward from the largest value."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    top = 0
    if largest > 0:
        decade = math.floor(math.log10(largest))
        top = 3 * decade + sum(largest > factor * 10.0**decade for factor in _DECADE) - 1
    thirds = range(top - STEPS + 1, top + 1)
    return ColorScale(tuple(_DECADE[third % 3] * 10.0 ** (third // 3) for third in thirds))


def error_scale(values: Iterable[float]) -> ColorScale:
    """Equal steps over all values, logarithmic ones where these differ widely."""
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if not positive or max(positive) > _LOG_RATIO * min(positive):
        return log_scale(positive)
    low, high = min(positive), max(positive)
    if high < _MIN_RATIO * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(_MIN_RATIO), middle * math.sqrt(_MIN_RATIO)
    width = _round_up((high - low) / STEPS)
    first = math.floor(low / width)
    return ColorScale(tuple(width * (first + index) for index in range(STEPS)))


def _round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8 in its decade."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(step for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9))
