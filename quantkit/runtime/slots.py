"""Which slots of an engine are free, and which tokens they hold that a new prompt can reuse."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

FEW_ROWS = 16
"""Up to this many rows of one sequence in a step, attention kernels may add up scores in another
order.
"""


class SlotContents(NamedTuple):
    """The tokens whose keys and values are in a slot, in the order of their positions.

    They begin with the prompt that the slot has read, or with a part of it; `prompt_length` is the
    length of the whole prompt.
    """

    tokens: Sequence[int] = ()
    prompt_length: int = 0


def count_common_prefix(prompt: Sequence[int], slot_content: SlotContents) -> int:
    """Compute the length of the common prefix, without the prompt's last token."""
    # The last token is always computed, because its logits are needed.
    end = min(len(prompt) - 1, len(slot_content.tokens))
    for index in range(end):
        if prompt[index] != slot_content.tokens[index]:
            return index
    return end


def bitwise_reusable_prefix(
    prompt: Sequence[int], slot_content: SlotContents, chunk: int, *, windows: bool
) -> int:
    """Compute the length of the common prefix whose keys and values have the same bits as if the
    prompt were computed.

    A prompt is read in chunks that begin at multiples of `chunk`. Keys and values of a whole chunk
    are the same in every prompt with that prefix. Those of a part of a chunk are the same if the
    chunk has many rows in both prompts, many rows are left to compute, and no sliding window makes
    sums begin at other positions.
    """
    count = min(count_common_prefix(prompt, slot_content), slot_content.prompt_length)
    start = count // chunk * chunk
    # Rows of the chunk at `start` in the slot's prompt and in this one.
    num_slot_rows = min(slot_content.prompt_length - start, chunk)
    num_prompt_rows = min(len(prompt) - start, chunk)
    if windows or num_slot_rows <= FEW_ROWS:
        return start
    # More than FEW_ROWS rows must remain, so that they are summed in the order of the whole chunk.
    return max(start, min(count, start + num_prompt_rows - FEW_ROWS - 1))


class SlotTable:
    """The slots of an engine."""

    def __init__(
        self,
        slots: int,
        chunk: int,
        *,
        any_prefix: bool,
        windows: bool,
        max_unscaled_length: int | None = None,
        switches_once: bool = False,
        list_lengths: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        """Begin with free and empty slots.

        Args:
            any_prefix: reuse the whole common prefix; else only the `bitwise_reusable_prefix`.
            chunk, windows: rows of a prompt that are read at a time; whether a layer has a sliding
                window.
            max_unscaled_length: up to this length, a prompt's length does not change its rotary
                positions; None is any length.
            switches_once: whether all longer prompts have the same rotary positions; else each
                length has others.
            list_lengths: lists the numbers of first tokens of a slot that can be reused, if a layer
                keeps states; None if any number can.
        """
        # In the order of release: the slot that was released first is taken first.
        self._free = deque(range(slots))
        self._contents = [SlotContents() for _ in range(slots)]
        self._chunk = chunk
        self._any_prefix = any_prefix
        self._windows = windows
        if max_unscaled_length is None:
            self._max_unscaled_length = math.inf
        else:
            self._max_unscaled_length = max_unscaled_length
        self._switches_once = switches_once
        self._list_lengths = list_lengths

    @property
    def has_free_slot(self) -> bool:
        """Tell whether a slot is free."""
        return bool(self._free)

    def take(self, prompt: Sequence[int]) -> int:
        """Take a free slot for a prompt, and return its number.

        A slot whose contents the prompt continues, all but less than a chunk, is taken first: no
        other prompt needs them. Otherwise it is the slot that is free for the longest time, so that
        the contents of the others stay.
        """
        best_slot = self._free[0]
        best_count = 0
        for slot in self._free:
            count = self._count_reusable(prompt, slot)
            num_lost = len(self._contents[slot].tokens) - count
            if num_lost < self._chunk and count > best_count:
                best_slot = slot
                best_count = count
        return self._take(best_slot)

    def take_for(self, source: int) -> int:
        """Take this slot if it is free, else another, and return its number."""
        # A prompt in the slot itself needs no copy.
        return self._take(source if source in self._free else self._free[0])

    def _take(self, slot: int) -> int:
        self._free.remove(slot)
        return slot

    def release(self, slot: int, new_tokens: Sequence[int] = ()) -> None:
        """Free a slot, and record the new tokens after its prompt."""
        # Keys and values of decoded tokens may have other bits than those of a prompt.
        if self._any_prefix and new_tokens:
            content = self._contents[slot]
            self._contents[slot] = SlotContents(
                [*content.tokens, *new_tokens], content.prompt_length
            )
        self._free.append(slot)

    def record_contents(self, slot: int, prompt: Sequence[int], count: int) -> None:
        """Record that a slot contains the first tokens of a prompt, and nothing else to reuse."""
        self._contents[slot] = SlotContents(prompt[:count], len(prompt))

    def find_whole_prompt(self, prompt: Sequence[int]) -> int | None:
        """Find a slot that contains a whole prompt, and not as the beginning of a longer one."""
        prompt_tokens = list(prompt)
        for slot, content in enumerate(self._contents):
            # Rotary positions and chunks may depend on the length of the prompt.
            if content.prompt_length != len(prompt):
                continue
            if self._list_lengths and len(prompt) not in self._list_lengths(slot):
                continue
            if list(content.tokens[: len(prompt)]) == prompt_tokens:
                return slot
        return None

    def find_longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Find the slot with the longest reusable prefix of a prompt, and the prefix's length."""
        counts: list[int] = []
        for slot in range(len(self._contents)):
            counts.append(self._count_reusable(prompt, slot))
        longest = max(counts)
        return counts.index(longest), longest

    def _count_reusable(self, prompt: Sequence[int], slot: int) -> int:
        """Count the first tokens of a prompt whose keys and values can be copied from a slot."""
        content = self._contents[slot]
        is_slot_scaled = content.prompt_length > self._max_unscaled_length
        is_prompt_scaled = len(prompt) > self._max_unscaled_length
        # Keys include rotary positions. Beyond the unscaled length these depend on the length of
        # the sequence, or are those of all longer sequences if the model switches once.
        if is_slot_scaled or is_prompt_scaled:
            have_same_positions = self._switches_once and is_slot_scaled and is_prompt_scaled
            if not have_same_positions:
                return 0
        if self._any_prefix:
            count = count_common_prefix(prompt, content)
        else:
            count = bitwise_reusable_prefix(prompt, content, self._chunk, windows=self._windows)
        if self._list_lengths is None:
            return count
        reusable = 0
        for length in self._list_lengths(slot):
            # States within a chunk of a prompt may have other bits in another prompt.
            is_same = self._any_prefix or length % self._chunk == 0
            if is_same and reusable < length <= count:
                reusable = length
        return reusable
