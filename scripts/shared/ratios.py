"""Medians of what is measured in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Return the median of the ratios of what was measured in turn.

    A ratio is of two measurements that follow each other, so that what else runs on the machine
    slows both. The ratio of the medians would not have that.

    Raises:
        ValueError: if one has more measurements than the other.
    """
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(numerator / denominator for numerator, denominator in pairs)
