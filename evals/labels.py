"""Where the names of points in a chart go, so that they overlap nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))


@dataclass(frozen=True)
class Box:
    """A rectangle; `low` and `high` are the ends of its vertical side."""

    left: float
    low: float
    right: float
    high: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.high, other.high) - max(self.low, other.low)
        return max(0.0, width) * max(0.0, height)


def place_label(
    point: tuple[float, float], size: tuple[float, float], distances: Iterable[float], within: Box, taken: list[Box]
) -> Box:
    """The box next to a point that overlaps the least of `taken`, the nearest of several; it is added to `taken`.

    Args:
        size: width and height of the label.
        distances: from the point to the label, to try.
        within: area that the label should not leave.
    """

    def cost(box: Box) -> float:
        outside = size[0] * size[1] - box.overlap(within)
        return round(sum(box.overlap(other) for other in taken) + 10 * outside, 3)  # equal where only floats differ

    place = min(_candidates(point, size, distances), key=cost)
    taken.append(place)
    return place


def _candidates(point: tuple[float, float], size: tuple[float, float], distances: Iterable[float]) -> Iterator[Box]:
    (x, y), (width, height) = point, size
    for distance in distances:
        for right, up in _DIRECTIONS:
            left = x + right * distance - width * (1 - right) / 2
            low = y + up * distance - height * (1 - up) / 2
            yield Box(left, low, left + width, low + height)


def shorten(name: str, length: int) -> str:
    """A name of at most `length` characters: the two ends of a longer one."""
    half = (length - 1) // 2
    return name if len(name) <= length else f"{name[:half]}…{name[-half:]}"
