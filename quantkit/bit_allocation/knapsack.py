"""The multiple-choice knapsack: one option for each item, so that all fit and what is lost is least.

Solved by dynamic programming over sizes. They are whole numbers of cells: of their greatest common divisor where that
gives few enough cells, so that the choice is exact; otherwise rounded up to larger cells, and what room that leaves is
filled up, best bargain first. Equal inputs give the equal choice: of equal losses the smaller option is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CELLS = 1 << 17


@dataclass(frozen=True)
class Option:
    """What may be taken for an item.

    Attributes:
        size: a whole number, not negative.
        loss: what it costs, not negative.
    """

    size: int
    loss: float


def choose(items: Sequence[Sequence[Option]], room: int, *, cells: int = _CELLS) -> list[int] | None:
    """The number of the option for each item, whose sizes are `room` at most together; None if nothing fits.

    Args:
        items: the options of each, at least one.
        cells: how finely sizes are told apart.
    """
    smallest = [min(option.size for option in options) for options in items]
    spare = room - sum(smallest)
    if spare < 0:
        return None
    above = [[option.size - least for option in options] for options, least in zip(items, smallest, strict=True)]
    spare = min(spare, sum(map(max, above)))
    cell = math.gcd(*(size for sizes in above for size in sizes)) or 1
    exact = spare // cell <= cells
    if not exact:
        cell = -(-spare // cells)
    chosen = _chosen(items, [[-(-size // cell) for size in sizes] for sizes in above], spare // cell)
    return chosen if exact else _filled_up(items, chosen, room)


def _chosen(items: Sequence[Sequence[Option]], sizes: Sequence[Sequence[int]], room: int) -> list[int]:
    """The exact choice for sizes in cells, of which one of each item is 0."""
    least = np.zeros(room + 1)  # that can be lost by the items so far, for each room
    taken = np.zeros((len(items), room + 1), dtype=np.uint8)
    for number, (options, own) in enumerate(zip(items, sizes, strict=True)):
        before, least = least, np.full(room + 1, np.inf)
        for option in sorted(range(len(options)), key=lambda one: (own[one], options[one].loss, one)):
            size = own[option]
            if size > room:
                continue
            lost = before[: room + 1 - size] + options[option].loss
            better = lost < least[size:]
            least[size:][better] = lost[better]
            taken[number, size:][better] = option
    found = []
    for number in reversed(range(len(items))):
        found.append(int(taken[number, room]))
        room -= sizes[number][found[-1]]
    return found[::-1]


def _filled_up(items: Sequence[Sequence[Option]], chosen: Sequence[int], room: int) -> list[int]:
    """A choice with larger options of less loss, as long as any fits: always that which saves most for its size."""
    found = list(chosen)
    spare = room - sum(options[one].size for options, one in zip(items, found, strict=True))
    while True:
        best: tuple[float, int, int] | None = None
        for number, options in enumerate(items):
            now = options[found[number]]
            for index, option in enumerate(options):
                more, saved = option.size - now.size, now.loss - option.loss
                if more <= spare and saved > 0 and (best is None or saved / max(more, 1) > best[0]):
                    best = saved / max(more, 1), number, index
        if best is None:
            return found
        _, number, index = best
        spare -= items[number][index].size - items[number][found[number]].size
        found[number] = index
