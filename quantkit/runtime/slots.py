"""Which slots of an engine are free, and what they hold that a prompt can begin with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FEW_ROWS = 16
"""Of one sequence in a step: for so many, kernels may attend in another order of sums than for more."""


@dataclass(frozen=True)
class Held:
    """What a slot holds.

    Attributes:
        tokens: in their positions.
        prompt_length: of the prompt that begins with them, or that they begin with.
    """

    tokens: Sequence[int] = ()
    prompt_length: int = 0


def common(prompt: Sequence[int], held: Held) -> int:
    """How many tokens both begin with, but for the prompt's last, whose logits are needed."""
    most = min(len(prompt) - 1, len(held.tokens))
    return next((at for at in range(most) if prompt[at] != held.tokens[at]), most)


def exact(prompt: Sequence[int], held: Held, chunk: int, *, windows: bool) -> int:
    """As `common`, of what has the bits that the prompt would give itself.

    A prompt is read in chunks that begin at multiples of `chunk`. Keys and values of a whole chunk are the same in
    every prompt that begins so; those of a part of one are, where there are many rows in either prompt's chunk and
    many are left, and no window lets the sums of neighbours begin in one place.
    """
    count = min(common(prompt, held), held.prompt_length)
    start = count // chunk * chunk
    theirs, ours = (min(length - start, chunk) for length in (held.prompt_length, len(prompt)))
    if windows or theirs <= FEW_ROWS:
        return start
    return max(start, min(count, start + ours - FEW_ROWS - 1))


class SlotTable:
    """The slots of an engine."""

    def __init__(
        self, slots: int, chunk: int, *, any_prefix: bool, windows: bool, unstretched: int | None = None,
        switches: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            chunk: rows of a prompt that are read at a time.
            any_prefix: whether a prompt may begin with all that a slot holds of it, or only with what is `exact`.
            windows: whether a layer sees but some positions back.
            unstretched: the longest prompt whose length does not change its rotary positions; None is any.
            switches: whether those of all longer ones are alike; else each length has its own.
        """
        self._free = deque(range(slots))  # the one that was left first is taken first
        self._held = [Held() for _ in range(slots)]
        self._chunk, self._any_prefix, self._windows = chunk, any_prefix, windows
        self._unstretched = math.inf if unstretched is None else unstretched
        self._switches = switches

    @property
    def free(self) -> bool:
        """Whether there is one."""
        return bool(self._free)

    def take(self, prompt: Sequence[int]) -> int:
        """A free slot, with most of a prompt if there are several."""
        slot = max(self._free, key=lambda one: self._reusable(prompt, one))
        self._free.remove(slot)
        return slot

    def take_for(self, source: int) -> int:
        """A free slot, this one if it is free."""
        slot = source if source in self._free else self._free[0]
        self._free.remove(slot)
        return slot

    def release(self, slot: int, more: Sequence[int] = ()) -> None:
        """Free a slot, which holds `more` tokens after its prompt."""
        if self._any_prefix and more:
            held = self._held[slot]
            self._held[slot] = Held([*held.tokens, *more], held.prompt_length)
        self._free.append(slot)

    def hold(self, slot: int, prompt: Sequence[int], count: int) -> None:
        """Note that a slot holds the first tokens of a prompt, and nothing else of use."""
        self._held[slot] = Held(prompt[:count], len(prompt))

    def with_all_of(self, prompt: Sequence[int]) -> int | None:
        """A slot that begins with a whole prompt, read as such and not as the beginning of a longer one."""
        size = len(prompt)
        found = (
            slot for slot, held in enumerate(self._held)
            if held.prompt_length == size and list(held.tokens[:size]) == list(prompt)
        )  # fmt: skip
        return next(found, None)

    def best(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The slot with most tokens that the prompt can begin with, and their number."""
        slot = max(range(len(self._held)), key=lambda one: self._reusable(prompt, one))
        return slot, self._reusable(prompt, slot)

    def _reusable(self, prompt: Sequence[int], slot: int) -> int:
        held = self._held[slot]
        longer = [length > self._unstretched for length in (held.prompt_length, len(prompt))]
        if any(longer) and not (self._switches and all(longer)):
            return 0
        if self._any_prefix:
            return common(prompt, held)
        return exact(prompt, held, self._chunk, windows=self._windows)
