"""Names of models in tables, and their places in charts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """The shortest ends of paths that are distinct: ``int4``, or ``a/int4`` where there is a ``b/int4`` too."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    return [_end(own, {other for other in parts if other != own}) for own in parts]


def _end(own: tuple[str, ...], others: set[tuple[str, ...]]) -> str:
    for count in range(1, len(own)):
        if not any(other[-count:] == own[-count:] for other in others):
            return "/".join(own[-count:])
    return str(Path(*own))


def named(texts: Sequence[str | Path]) -> list[tuple[str | None, Path]]:
    """Paths with their names in ``NAME=PATH``; None for a path that exists under the whole string."""
    return [_named(str(text)) for text in texts]


def _named(text: str) -> tuple[str | None, Path]:
    name, _, path = text.partition("=")
    if not name.strip() or not path or "/" in name or os.path.lexists(text):
        return None, Path(text)
    return name.strip(), Path(path)


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
