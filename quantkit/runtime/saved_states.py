"""The states of an engine's slots: after which token each slot's states are, and copies of earlier
ones, from which a prompt with the same prefix continues.

Keys and values of a prefix stay in a slot when more tokens are added. A state does not: it is
replaced by that after the next token.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quantkit.errors import RequestError
from quantkit.model.cache import KVCache


class SavedStates:
    """Follows the states in the slots of a cache."""

    def __init__(self, cache: KVCache, slots: int) -> None:
        self._cache = cache
        # The tokens that the states of each slot follow.
        self._counts = [0] * slots
        # Copies of each slot's states by the tokens that they follow, in rising order.
        self._saved: list[dict[int, list[Tensor]]] = [{} for _ in range(slots)]

    def advance(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Follow a step that appends tokens at positions of slots, before it runs.

        Raises:
            RequestError: if a sequence neither begins nor continues after the last token of its
                slot: its states are not those at this position.
        """
        counts = dict(enumerate(self._counts))
        begun: set[int] = set()
        for slot, position in zip(slots, positions, strict=True):
            if position == 0:
                begun.add(slot)
            elif position != counts[slot]:
                raise RequestError(
                    "the states of a sequence cannot go back to an earlier token",
                    found=f"position {position} after {counts[slot]} tokens",
                )
            counts[slot] = position + 1
        for slot in begun:
            self._saved[slot] = {}
        self._counts = [counts[slot] for slot in range(len(counts))]

    def lengths(self, slot: int) -> set[int]:
        """List the numbers of first tokens of a slot whose states can be restored."""
        return {self._counts[slot], *self._saved[slot]}

    def save(self, slot: int) -> None:
        """Keep a copy of the states of a slot, after a chunk of its prompt.

        A prompt of N chunks keeps about log2(N) copies, such that at least half of any prefix in
        whole chunks can be restored.
        """
        saved = self._saved[slot]
        count = self._counts[slot]
        while len(saved) > 1 and count <= 2 * list(saved)[-2]:
            # Without it, the distance between two copies is still at most a factor of two.
            del saved[list(saved)[-1]]
        saved[count] = [state.clone() for state in self._cache.slot_states(slot)]

    def restore(self, source: int, target: int, count: int) -> None:
        """Set the states of a slot to those after the first tokens of another, or of itself; their
        number is one of `lengths`.

        Raises:
            RequestError: if these states were not kept.
        """
        saved = self._saved[source]
        if count == 0:
            # A sequence that begins at position 0 begins with zeros.
            self._counts[target] = 0
            return
        if count in saved:
            states = saved[count]
        elif count == self._counts[source]:
            states = self._cache.slot_states(source)
        else:
            raise RequestError(
                "the states after this prefix were not kept",
                found=f"{count} tokens",
                expected=", ".join(map(str, sorted(self.lengths(source)))),
            )
        if source != target or count != self._counts[source]:
            for state, restored in zip(self._cache.slot_states(target), states, strict=True):
                state.copy_(restored)
        self._counts[target] = count
        # Copies never change, so both slots may share them.
        self._saved[target] = {length: kept for length, kept in saved.items() if length <= count}
