"""Tokens proposed from the text itself (prompt lookup): those that followed an earlier occurrence
of the last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (4, 3, 2)
"""Of the runs of tokens that are looked up, the longest first."""


class Acceptance:
    """The share of proposals that are right, mostly of the latest ones; half before the first."""

    # Each token multiplies the weight of all earlier tokens by this.
    _KEPT = 0.9
    # The weight of the assumption at the start, in tokens.
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
        decay = self._KEPT ** (right + wrong)
        self._right = self._right * decay + right
        self._total = self._total * decay + right + wrong

    def fade(self, tokens: int) -> None:
        """Count tokens for which nothing was proposed: earlier counts become less certain."""
        # More slowly than by tokens that are compared, so that proposals are tried again later.
        decay = self._KEPT ** (tokens / 8)
        assumed_weight = self._BEFORE * (1 - decay)
        self._right = self._right * decay + assumed_weight / 2
        self._total = self._total * decay + assumed_weight


class Lookup:
    """Proposes how a sequence of tokens continues, from the sequence itself.

    Each proposal is compared with the tokens that follow, even if no step verified it, so the
    acceptance rate is known without any cost.

    Attributes:
        proposed: the last proposal; None if there was none.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        # The index after the last occurrence of a run of tokens, by the hash of the run.
        self._after: dict[int, int] = {}
        # Counted by size, as a longer run is the better evidence.
        self._rates = {size: Acceptance() for size in SIZES}
        self.proposed: list[int] | None = None
        # The size of the run that the last proposal follows.
        self._size = SIZES[0]
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
            num_comparable = min(len(self.proposed), len(tokens))
            num_right = 0
            while num_right < num_comparable and self.proposed[num_right] == tokens[num_right]:
                num_right += 1
            # Tokens after the first wrong one follow another text, so only one counts as wrong.
            self._rates[self._size].add(num_right, int(num_right < num_comparable))
            self.proposed = None
        self._append(tokens)

    def propose(self, count: int) -> list[int]:
        """Propose `count` tokens that may come next; none if the last tokens are new together."""
        for size in SIZES:
            if len(self._text) < size:
                continue
            start = self._after.get(_hash(self._text, len(self._text), size))
            if start is not None:
                proposed = self._text[start : start + count]
                period = len(self._text) - start
                # A text that repeats itself within the proposal continues with the same period.
                while len(proposed) < count:
                    proposed.append(proposed[len(proposed) - period])
                self._size = size
                self.proposed = proposed
                return proposed
        self.proposed = None
        return []

    def _append(self, tokens: Sequence[int]) -> None:
        """Append tokens, and index the runs before each of them."""
        for token in tokens:
            # The runs before the token, not those with it: a run is followed by something.
            end = len(self._text)
            for size in SIZES:
                if end >= size:
                    self._after[_hash(self._text, end, size)] = end
            self._text.append(token)


def _hash(text: list[int], end: int, size: int) -> int:
    """Hash the run of tokens that ends at an index."""
    # Runs are not compared: two with the same hash only make a proposal wrong.
    return hash(tuple(text[end - size : end]))
