"""The multiple-choice knapsack: one option for each item, so that all fit and the total loss is
smallest.

Solved by dynamic programming over sizes, in cells. A cell is the greatest common divisor of the
sizes if that gives few enough cells, so that the choice is exact. Otherwise sizes are rounded up to
larger cells, and the remaining room is filled with the options that save most for their size. Equal
inputs give equal choices: of options with equal losses the smaller one is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_CELLS = 1 << 17


class Option(NamedTuple):
    """An option for an item: its size, and its loss, neither of them negative."""

    size: int
    loss: float


def choose(
    items: Sequence[Sequence[Option]], room: int, *, cells: int = _CELLS
) -> list[int] | None:
    """Return the index of the option for each item, with a total size of `room` at most; None if
    nothing fits. Each item has at least one option; there are at most `cells` cells.
    """
    smallest = []
    for options in items:
        smallest.append(min(option.size for option in options))
    spare = room - sum(smallest)
    if spare < 0:
        return None
    above = []
    for options, base in zip(items, smallest, strict=True):
        above.append([option.size - base for option in options])
    spare = min(spare, sum(map(max, above)))
    cell = math.gcd(*(size for sizes in above for size in sizes)) or 1
    exact = spare // cell <= cells
    if not exact:
        cell = -(-spare // cells)
    chosen = _solve_knapsack(
        items, [[-(-size // cell) for size in sizes] for sizes in above], spare // cell
    )
    if exact:
        return chosen
    return _fill_spare_room(items, chosen, room)


def _solve_knapsack(
    items: Sequence[Sequence[Option]], sizes: Sequence[Sequence[int]], room: int
) -> list[int]:
    """Return the exact choice for sizes in cells; the smallest of each item is 0."""
    # Loss of the items so far, for each room.
    smallest = np.zeros(room + 1)
    taken = np.zeros((len(items), room + 1), dtype=np.uint8)
    for number, (options, own) in enumerate(zip(items, sizes, strict=True)):
        before = smallest
        smallest = np.full(room + 1, np.inf)
        for option in sorted(
            range(len(options)), key=lambda one: (own[one], options[one].loss, one)
        ):
            size = own[option]
            if size > room:
                continue
            lost = before[: room + 1 - size] + options[option].loss
            better = lost < smallest[size:]
            smallest[size:][better] = lost[better]
            taken[number, size:][better] = option
    found = []
    for number in reversed(range(len(items))):
        found.append(int(taken[number, room]))
        room -= sizes[number][found[-1]]
    return found[::-1]


def _fill_spare_room(
    items: Sequence[Sequence[Option]], chosen: Sequence[int], room: int
) -> list[int]:
    """Return the choice with larger options of smaller loss, while any fits: first the one that
    saves most for its size.
    """
    result = list(chosen)
    spare = room - sum(options[one].size for options, one in zip(items, result, strict=True))
    while True:
        swaps = [
            ((options[now].loss - option.loss) / max(more, 1), more, number, index)
            for number, (options, now) in enumerate(zip(items, result, strict=True))
            for index, option in enumerate(options)
            if (more := option.size - options[now].size) <= spare
            and option.loss < options[now].loss
        ]
        if not swaps:
            return result
        _, more, number, index = max(swaps, key=lambda swap: swap[0])
        spare -= more
        result[number] = index
