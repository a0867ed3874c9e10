"""What the text of an answer is split into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` are a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """A part of an answer: text of its content or of its reasoning, or a call."""

    content: str = ""
    reasoning: str = ""
    call: Call | None = None


class Parser(Protocol):
    """Splits a text that arrives in parts. The assembled pieces do not depend on how the text is
    divided into parts.
    """

    def feed(self, text: str) -> list[Piece]:
        """Read more text and return the pieces that it completes."""
        ...

    def close(self) -> list[Piece]:
        """End the text and return the remaining pieces."""
        ...


class PlainParser:
    """A `Parser` of content alone."""

    def feed(self, text: str) -> list[Piece]:
        return [Piece(text)] if text else []

    def close(self) -> list[Piece]:
        return []


def count_partial_mark(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of a text that may be the beginning of a mark."""
    # A complete mark is not partial, hence one less than its length.
    longest_mark = max(map(len, marks), default=0)
    longest_part = min(longest_mark - 1, len(text))
    for count in range(longest_part, 0, -1):
        ending = text[-count:]
        if any(mark.startswith(ending) for mark in marks):
            return count
    return 0


def count_held_back(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of a text that may be the beginning of a mark, together with
    the space before it, or at the end of the text.
    """
    # Space before a mark is dropped, so it cannot be emitted before the mark is known.
    before_mark = text[: len(text) - count_partial_mark(text, marks)]
    return len(text) - len(before_mark.rstrip())
