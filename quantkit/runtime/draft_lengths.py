"""How many tokens to propose: as long as the next one gains more than its row of a step costs."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

K = TypeVar("K")


class Chance(NamedTuple):
    """What could be proposed for a sequence: at most `limit` tokens, each right with probability
    `rate` if all before it are. To propose one costs `seconds`, besides the row that verifies it.
    """

    limit: int
    rate: float
    seconds: float = 0.0


class StepTimes:
    """Seconds of a step by its number of rows: a line through the latest steps."""

    _KEPT = 0.98  # of the weight of earlier steps with each later one
    # What another row is assumed to cost at first, of a step of one row.
    _SHARE = 0.1
    # the variance of rows, as a share of their squared mean, with which that counts for half
    _CERTAINTY = 0.002
    _NARROW = (
        # The variance, as such a share, below which steps say little of what a row costs.
        0.003
    )
    _OUTLIER = (
        # A step that takes this many times longer than expected has waited for something else.
        4.0
    )

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Count a step."""
        if self._weight:
            mean, row = self._line()
            seconds = min(
                seconds, self._OUTLIER * (mean + row * max(0.0, rows - self._rows / self._weight))
            )
        kept = self._KEPT
        self._weight = self._weight * kept + 1
        self._rows = self._rows * kept + rows
        self._seconds = self._seconds * kept + seconds
        self._squares = self._squares * kept + rows * rows
        self._products = self._products * kept + rows * seconds

    def of(self, rows: int) -> tuple[float, float] | None:
        """Seconds of a step of this number of rows, and those of another row; None before any
        step.
        """
        if not self._weight:
            return None
        mean, row = self._line()
        return max(mean + row * (rows - self._rows / self._weight), row), row

    def lacks(self, rows: int) -> bool:
        """Return whether a step of so few rows should be taken, to learn what other rows cost: the
        latest all had more.
        """
        if not self._weight:
            return False
        mean = self._rows / self._weight
        return (
            mean > rows + 0.5
            and self._squares / self._weight - mean * mean < self._NARROW * mean * mean
        )

    def _line(self) -> tuple[float, float]:
        """Seconds at the mean number of rows, and of a row more."""
        rows = self._rows / self._weight
        seconds = self._seconds / self._weight
        spread = max(0.0, self._squares / self._weight - rows * rows)
        together = self._products / self._weight - rows * seconds
        assumed = self._SHARE * seconds / (1 + self._SHARE * (rows - 1))
        certainty = self._CERTAINTY * rows * rows * max(1.0, 4 / self._weight)
        return seconds, max(assumed / 10, (together + certainty * assumed) / (spread + certainty))


def lengths(chances: Mapping[K, Chance], rows: int, tokens: int, times: StepTimes) -> dict[K, int]:
    """Return how many tokens to propose for each sequence, so that a step gives the most tokens a
    second.

    Args:
        rows: of the step without proposals.
        tokens: new ones that it gives without them.
    """
    result = dict.fromkeys(chances, 0)
    known = times.of(rows)
    if known is None or times.lacks(rows):
        return result
    seconds, row = known
    gained = float(tokens)
    # By what a second of each proposal's next token gives; a proposal's tokens are ever less
    # likely.
    heap = [
        (-chance.rate / (row + chance.seconds), number)
        for number, chance in enumerate(chances.values())
        if chance.limit
    ]
    keys = list(chances)
    values = list(chances.values())
    heapq.heapify(heap)
    while heap:
        worth, number = heapq.heappop(heap)
        one = values[number]
        key = keys[number]
        if -worth * seconds <= gained:
            break
        result[key] += 1
        gained += one.rate ** result[key]
        seconds += row + one.seconds
        if result[key] < one.limit:
            heapq.heappush(heap, (worth * one.rate, number))
    return result
