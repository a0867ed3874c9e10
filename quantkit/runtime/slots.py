"""Which slots of an engine are free, and which tokens they hold that a new prompt can reuse."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

FEW_ROWS = 16
"""Up to this many rows of one sequence in a step, attention kernels may add up scores in another
order.
"""


class Held(NamedTuple):
    """The tokens whose keys and values a slot holds, in the order of their positions, and the
    length of the prompt that they begin with, or that begins with them.
    """

    tokens: Sequence[int] = ()
    prompt_length: int = 0


def common_prefix(prompt: Sequence[int], slot_content: Held) -> int:
    """Return the length of the common prefix, without the prompt's last token, whose logits are
    needed.
    """
    end = min(len(prompt) - 1, len(slot_content.tokens))
    return next((at for at in range(end) if prompt[at] != slot_content.tokens[at]), end)


def bitwise_reusable_prefix(
    prompt: Sequence[int], slot_content: Held, chunk: int, *, windows: bool
) -> int:
    """Return the length of the common prefix whose keys and values have the bits that the prompt
    would compute itself.

    A prompt is read in chunks that begin at multiples of `chunk`. Keys and values of a whole chunk
    are the same in every prompt with that prefix. Those of a part of a chunk are the same if the
    chunk has many rows in both prompts, many rows are left to compute, and no sliding window makes
    sums begin at other positions.
    """
    count = min(common_prefix(prompt, slot_content), slot_content.prompt_length)
    start = count // chunk * chunk
    theirs, ours = (
        min(length - start, chunk) for length in (slot_content.prompt_length, len(prompt))
    )
    if windows or theirs <= FEW_ROWS:
        return start
    return max(start, min(count, start + ours - FEW_ROWS - 1))


class SlotTable:
    """The slots of an engine."""

    def __init__(
        self,
        slots: int,
        chunk: int,
        *,
        any_prefix: bool,
        windows: bool,
        unscaled: int | None = None,
        switches: bool = False,
    ) -> None:
        """
        Args:
            any_prefix: reuse the whole common prefix; else only the `bitwise_reusable_prefix`.
            chunk, windows: rows of a prompt that are read at a time; whether a layer has a sliding
                window.
            unscaled: up to this length, a prompt's length does not change its rotary positions;
                None is any length.
            switches: whether all longer prompts have the same rotary positions; else each length
                has others.
        """
        # The slot that was released first is taken first.
        self._free = deque(range(slots))
        self._contents = [Held() for _ in range(slots)]
        self._chunk = chunk
        self._any_prefix = any_prefix
        self._windows = windows
        if unscaled is None:
            self._unscaled = math.inf
        else:
            self._unscaled = unscaled
        self._switches = switches

    @property
    def free(self) -> bool:
        """Return whether a slot is free."""
        return bool(self._free)

    def take(self, prompt: Sequence[int]) -> int:
        """Take a free slot: where the prompt goes on from all that one holds, but for less than a
        chunk, that one; else the one that is free for longest, so that what others hold stays.
        """
        reusable = {slot: self._count_reusable(prompt, slot) for slot in self._free}
        going_on = {}
        for slot, count in reusable.items():
            if 0 <= len(self._contents[slot].tokens) - count < self._chunk:
                going_on[slot] = count
        best = max(going_on, key=going_on.__getitem__, default=self._free[0])
        return self._take(best if going_on.get(best) else self._free[0])

    def take_for(self, source: int) -> int:
        """Take this slot if it is free, else another."""
        return self._take(source if source in self._free else self._free[0])

    def _take(self, slot: int) -> int:
        self._free.remove(slot)
        return slot

    def release(self, slot: int, new_tokens: Sequence[int] = ()) -> None:
        """Free a slot, which holds new tokens after its prompt."""
        if self._any_prefix and new_tokens:
            held = self._contents[slot]
            self._contents[slot] = Held([*held.tokens, *new_tokens], held.prompt_length)
        self._free.append(slot)

    def hold(self, slot: int, prompt: Sequence[int], count: int) -> None:
        """Note that a slot holds the first tokens of a prompt, and nothing else to reuse."""
        self._contents[slot] = Held(prompt[:count], len(prompt))

    def find_whole_prompt(self, prompt: Sequence[int]) -> int | None:
        """Return a slot that holds a whole prompt, read as such and not as the beginning of a
        longer one.
        """
        for slot, content in enumerate(self._contents):
            if content.prompt_length == len(prompt) and list(content.tokens[: len(prompt)]) == list(
                prompt
            ):
                return slot
        return None

    def find_longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the slot with the longest reusable prefix of a prompt, and its length."""
        slot = max(range(len(self._contents)), key=lambda one: self._count_reusable(prompt, one))
        return slot, self._count_reusable(prompt, slot)

    def _count_reusable(self, prompt: Sequence[int], slot: int) -> int:
        held = self._contents[slot]
        scaled = [length > self._unscaled for length in (held.prompt_length, len(prompt))]
        if any(scaled) and not (self._switches and all(scaled)):
            return 0
        if self._any_prefix:
            return common_prefix(prompt, held)
        return bitwise_reusable_prefix(prompt, held, self._chunk, windows=self._windows)
