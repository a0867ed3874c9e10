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
    """Splits a text that comes in parts; the same text gives the same pieces, put together, in
    whatever parts.
    """

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that are known with more text."""
        ...

    def close(self) -> list[Piece]:
        """Return what is left at the end of the text."""
        ...


class Plain:
    """A `Parser` of content alone."""

    def feed(self, text: str) -> list[Piece]:
        return [Piece(text)] if text else []

    def close(self) -> list[Piece]:
        return []


def count_partial_mark(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    longest = min(max((len(mark) for mark in marks), default=0) - 1, len(text))
    found = (
        count
        for count in range(longest, 0, -1)
        if any(mark.startswith(text[-count:]) for mark in marks)
    )
    return next(found, 0)


def count_held_back(text: str, marks: Sequence[str]) -> int:
    """Return the same, together with the space before it, or at the end of the text."""
    return len(text) - len(text[: len(text) - count_partial_mark(text, marks)].rstrip())
