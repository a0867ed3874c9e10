"""How errors of the outputs of linears add up, kept for the solver, which needs the first block
first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from quantkit.passes.activation_store import ActivationStore
from quantkit.solver.two_sided import OutputFactor

_KEY = "output factor"


class OutputFactors:
    """The factors of all groups of linears, each of which is taken from the store once."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        # By each linear: rows of its group, blocks.
        self._groups: dict[str, tuple[dict[str, slice], int]] = {}

    def keep(self, rows: Mapping[str, slice], blocks: list[Tensor]) -> None:
        """Keep the factor of linears by full name, which have these rows of it."""
        for number, block in enumerate(blocks):
            self._store.put((_KEY, next(iter(rows)), number), block)
        for name in rows:
            self._groups[name] = dict(rows), len(blocks)

    def take(self, names: Collection[str]) -> tuple[OutputFactor | None, dict[str, OutputFactor]]:
        """Take the factors of linears that share their inputs.

        Returns:
            The factor of all together, if these are all linears of their group, in order, else
            None; and the factor of each by name, empty where there are none.
        """
        group = self._groups.get(next(iter(names)))
        if group is None:
            return None, {}
        rows, count = group
        first = next(iter(rows))
        whole = OutputFactor(
            tuple(self._store.take((_KEY, first, number)) for number in range(count))
        )
        for name in rows:
            del self._groups[name]
        by_name = {name: whole.rows(rows[name].start, rows[name].stop) for name in names}
        if list(names) == list(rows):
            return whole, by_name
        return None, by_name
