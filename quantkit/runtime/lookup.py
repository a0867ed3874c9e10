"""Tokens proposed from the text itself (prompt lookup): what followed the last tokens where they
stood before.
"""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (4, 3, 2)
"""Of the runs of tokens that are looked up, the longest first."""


class Acceptance:
    """How often proposals are right, by the latest ones; of none, half."""

    _KEPT = 0.9  # of the weight of earlier tokens with each later one
    # The weight of what is assumed at the start.
    _BEFORE = 2.0

    def __init__(self) -> None:
        self._right = self._BEFORE / 2
        self._total = self._BEFORE

    @property
    def rate(self) -> float:
        """Return the share that is right."""
        return self._right / self._total

    def add(self, right: int, wrong: int) -> None:
        """Count tokens that were right, and those that were wrong after them."""
        kept = self._KEPT ** (right + wrong)
        self._right = self._right * kept + right
        self._total = self._total * kept + right + wrong

    def fade(self, tokens: int) -> None:
        """Count tokens for which nothing was proposed: what was seen becomes less certain."""
        kept = self._KEPT ** (tokens / 8)
        middle = self._BEFORE * (1 - kept)
        self._right = self._right * kept + middle / 2
        self._total = self._total * kept + middle


class Lookup:
    """Proposes how a sequence of tokens goes on, from the sequence itself.

    What it would have proposed is compared with what came, also where nobody wanted it, so it knows
    how often it is right without any cost.

    Attributes:
        proposed: the last proposal; None if there was none.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        # Where the text went on after a run of tokens, by its hash.
        self._after: dict[int, int] = {}
        self._rates = {size: Acceptance() for size in SIZES}
        self.proposed: list[int] | None = None
        self._size = SIZES[0]  # of the run that was found for it
        self._append(prompt)

    def __len__(self) -> int:
        return len(self._text)

    @property
    def rate(self) -> float:
        """Return the share of right tokens in proposals like the last one."""
        return self._rates[self._size].rate

    def extend(self, tokens: Sequence[int]) -> None:
        """Read the next tokens of the text."""
        if self.proposed is not None and tokens:
            both = min(len(self.proposed), len(tokens))
            right = next((at for at in range(both) if self.proposed[at] != tokens[at]), both)
            self._rates[self._size].add(right, int(right < both))
            self.proposed = None
        self._append(tokens)

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens that may come next; none where the last tokens stood nowhere
        before.
        """
        for size in SIZES:
            if len(self._text) >= size:
                at = self._after.get(_hash(self._text, len(self._text), size))
            else:
                at = None
            if at is not None:
                result = self._text[at : at + count]
                # What repeats itself goes on so.
                while len(result) < count:
                    result.append(result[len(result) - (len(self._text) - at)])
                self._size = size
                self.proposed = result
                return result
        self.proposed = None
        return []

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self._text)
            for size in SIZES:
                if end >= size:
                    self._after[_hash(self._text, end, size)] = end
            self._text.append(token)


def _hash(text: list[int], end: int, size: int) -> int:
    """Two runs with one hash only make a proposal wrong."""
    return hash(tuple(text[end - size : end]))
