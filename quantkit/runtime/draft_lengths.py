"""How many tokens to propose: as long as the next one gains more than its row of a step costs."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

K = TypeVar("K")


class Chance(NamedTuple):
    """The proposals that a sequence could get: at most `limit` tokens, each right with probability
    `rate` if all before it are. To propose one costs `seconds`, besides the row that verifies it.
    """

    limit: int
    rate: float
    seconds: float = 0.0


class StepTimes:
    """Seconds of a step by its number of rows: a line through the latest steps."""

    # Each step multiplies the weight of all earlier steps by this.
    _KEPT = 0.98
    # The assumed cost of another row, as a share of a step of one row, before anything is measured.
    _SHARE = 0.1
    # The assumption counts for half of the slope if the variance of rows is this share of their
    # squared mean.
    _CERTAINTY = 0.002
    # If the variance is a smaller share, the steps say little about the cost of a row.
    _NARROW = 0.003
    # A step that takes this many times longer than expected has waited for something else.
    _OUTLIER = 4.0

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Count a step."""
        if self._weight:
            mean_seconds, row_seconds = self._line()
            mean_rows = self._rows / self._weight
            expected_seconds = mean_seconds + row_seconds * max(0.0, rows - mean_rows)
            seconds = min(seconds, self._OUTLIER * expected_seconds)
        # Exponentially weighted sums suffice for a line of least squares.
        decay = self._KEPT
        self._weight = self._weight * decay + 1
        self._rows = self._rows * decay + rows
        self._seconds = self._seconds * decay + seconds
        self._squares = self._squares * decay + rows * rows
        self._products = self._products * decay + rows * seconds

    def estimate(self, rows: int) -> tuple[float, float] | None:
        """Estimate the seconds of a step of this number of rows, and of one row more.

        Returns None before any step.
        """
        if not self._weight:
            return None
        mean_seconds, row_seconds = self._line()
        mean_rows = self._rows / self._weight
        step_seconds = mean_seconds + row_seconds * (rows - mean_rows)
        # Far below the mean number of rows the line may be negative.
        return max(step_seconds, row_seconds), row_seconds

    def needs_step_of(self, rows: int) -> bool:
        """Tell whether a step of so few rows is needed to learn the cost of a row.

        It is if the latest steps all had more rows, and almost the same number.
        """
        if not self._weight:
            return False
        mean_rows = self._rows / self._weight
        squared_mean = mean_rows * mean_rows
        variance = self._squares / self._weight - squared_mean
        return mean_rows > rows + 0.5 and variance < self._NARROW * squared_mean

    def _line(self) -> tuple[float, float]:
        """Fit the seconds at the mean number of rows, and those of a row more."""
        rows = self._rows / self._weight
        seconds = self._seconds / self._weight
        # Rounding may make the difference negative.
        variance = max(0.0, self._squares / self._weight - rows * rows)
        covariance = self._products / self._weight - rows * seconds
        # The slope of a line with which a step of `rows` rows takes `seconds`.
        assumed_slope = self._SHARE * seconds / (1 + self._SHARE * (rows - 1))
        # The assumption is a prior of the slope; it counts for more before the first four steps.
        certainty = self._CERTAINTY * rows * rows * max(1.0, 4 / self._weight)
        slope = (covariance + certainty * assumed_slope) / (variance + certainty)
        # Noise may make the slope negative; a row always costs something.
        return seconds, max(assumed_slope / 10, slope)


def choose_lengths(
    chances: Mapping[K, Chance], rows: int, tokens: int, times: StepTimes
) -> dict[K, int]:
    """Choose how many tokens to propose for each sequence, to maximize tokens per second.

    Args:
        rows: of the step without proposals.
        tokens: new ones that it gives without them.
    """
    counts = dict.fromkeys(chances, 0)
    estimate = times.estimate(rows)
    if estimate is None or times.needs_step_of(rows):
        return counts
    seconds, row_seconds = estimate
    expected_tokens = float(tokens)
    keys = list(chances)
    values = list(chances.values())
    # Entries are the expected tokens per second of each sequence's next proposal, negative because
    # `heapq` pops the smallest. Later proposals of a sequence are less likely, so the first entry
    # is always the best choice among all proposals.
    heap: list[tuple[float, int]] = []
    for index, chance in enumerate(values):
        if chance.limit:
            heap.append((-chance.rate / (row_seconds + chance.seconds), index))
    heapq.heapify(heap)
    while heap:
        negative_rate, index = heapq.heappop(heap)
        chance = values[index]
        key = keys[index]
        # A proposal below the step's own tokens per second would lower them.
        if -negative_rate * seconds <= expected_tokens:
            break
        counts[key] += 1
        expected_tokens += chance.rate ** counts[key]
        seconds += row_seconds + chance.seconds
        if counts[key] < chance.limit:
            heapq.heappush(heap, (negative_rate * chance.rate, index))
    return counts
