"""The multiple-choice knapsack: one option for each item, so that all fit and the total loss is
smallest.

Solved by dynamic programming over sizes, in cells. A cell is the greatest common divisor of the
sizes if that gives few enough cells, so that the choice is exact. Otherwise sizes are rounded up to
larger cells, and the remaining room is filled with the options that save most for their size. Equal
inputs give equal choices: of options with equal losses the smaller one is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# The table of the dynamic program has a row of so many cells for each item.
_CELLS = 1 << 17


class ItemChoice(NamedTuple):
    """An option for an item: its size, and its loss, neither of them negative."""

    size: int
    loss: float


def choose(
    items: Sequence[Sequence[ItemChoice]], room: int, *, cells: int = _CELLS
) -> list[int] | None:
    """Choose the index of an option for each item, with a total size of `room` at most; None if
    nothing fits. Each item has at least one option; there are at most `cells` cells.
    """
    # Only the bytes above each item's smallest option are distributed, so that the table covers no
    # sizes that every choice needs.
    spare = room
    excess_sizes: list[list[int]] = []
    for options in items:
        smallest = min(option.size for option in options)
        spare -= smallest
        excess_sizes.append([option.size - smallest for option in options])
    if spare < 0:
        return None
    # More room than the largest options need changes nothing.
    spare = min(spare, sum(map(max, excess_sizes)))
    # All sizes may be 0, whose greatest common divisor is 0.
    cell = math.gcd(*itertools.chain.from_iterable(excess_sizes)) or 1
    exact = spare // cell <= cells
    if not exact:
        cell = -(-spare // cells)
    # Sizes are rounded up, so that a choice that fits in cells also fits in bytes.
    sizes_in_cells: list[list[int]] = []
    for sizes in excess_sizes:
        sizes_in_cells.append([-(-size // cell) for size in sizes])
    chosen = _solve_knapsack(items, sizes_in_cells, spare // cell)
    if exact:
        return chosen
    return _fill_spare_room(items, chosen, room)


def _solve_knapsack(
    items: Sequence[Sequence[ItemChoice]], sizes: Sequence[Sequence[int]], room: int
) -> list[int]:
    """Choose exactly for sizes in cells; the smallest of each item is 0."""
    # The smallest loss of the items so far, for each room.
    smallest_losses = np.zeros(room + 1)
    # The option of each item in that choice, as a byte: the table has a cell for each item and
    # room.
    best_options = np.zeros((len(items), room + 1), dtype=np.uint8)
    for number, (options, item_sizes) in enumerate(zip(items, sizes, strict=True)):
        losses_before = smallest_losses
        smallest_losses = np.full(room + 1, np.inf)
        # A later option replaces one only if its loss is smaller, so of equal losses the smaller
        # size stays.
        by_size: list[tuple[int, float, int]] = []
        for option_number, option in enumerate(options):
            by_size.append((item_sizes[option_number], option.loss, option_number))
        for size, loss, option_number in sorted(by_size):
            if size > room:
                continue
            losses = losses_before[: room + 1 - size] + loss
            better = losses < smallest_losses[size:]
            smallest_losses[size:][better] = losses[better]
            best_options[number, size:][better] = option_number
    # From the last item back, each choice determines the room of the items before it.
    chosen: list[int] = []
    for number in reversed(range(len(items))):
        option_number = int(best_options[number, room])
        chosen.append(option_number)
        room -= sizes[number][option_number]
    return chosen[::-1]


def _fill_spare_room(
    items: Sequence[Sequence[ItemChoice]], chosen: Sequence[int], room: int
) -> list[int]:
    """Replace options by larger ones of smaller loss, while any fits: first the one that saves
    most for its size.
    """
    indices = list(chosen)
    spare = room
    for options, index in zip(items, indices, strict=True):
        spare -= options[index].size
    while True:
        best_gain = 0.0
        best_swap: tuple[int, int, int] | None = None
        for number, (options, current_index) in enumerate(zip(items, indices, strict=True)):
            current = options[current_index]
            for index, option in enumerate(options):
                extra_size = option.size - current.size
                if extra_size <= spare and option.loss < current.loss:
                    # An option that is no larger counts as one byte larger.
                    gain = (current.loss - option.loss) / max(extra_size, 1)
                    # The first of equal gains, so that equal inputs give equal choices.
                    if best_swap is None or gain > best_gain:
                        best_gain = gain
                        best_swap = (number, index, extra_size)
        if best_swap is None:
            return indices
        number, index, extra_size = best_swap
        spare -= extra_size
        indices[number] = index
