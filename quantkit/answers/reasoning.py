"""Reasoning before an answer, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.answers.pieces import Parser, Piece, count_held_back
from quantkit.grammar.after_reasoning import Reasoning
from quantkit.text.tokenizer import Tokenizer

OPENS = "<think>"
CLOSES = "</think>"


def reasoning_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Reasoning | None:
    """Return how the answer to a prompt may begin with reasoning; None if the vocabulary has no
    tokens for that, or the prompt itself has closed it, as templates do where none is wanted.
    """
    known = tokenizer.special_tokens or {}
    if OPENS not in known or CLOSES not in known:
        return None
    begin = known[OPENS]
    end = known[CLOSES]
    last = next(
        (place for place in range(len(prompt) - 1, -1, -1) if prompt[place] in (begin, end)), None
    )
    if last is None or tokenizer.decode(prompt[last + 1 :], specials=True).strip():
        return Reasoning(begin, end, opened=False)
    if prompt[last] == begin:
        return Reasoning(begin, end, opened=True)
    return None


@dataclass
class ReasoningParser:
    """A `Parser` of reasoning, and of what follows by another one. Space around the reasoning is
    dropped.

    Attributes:
        opened: whether the text begins within the reasoning; otherwise with ``<think>``, or without
            reasoning.
    """

    answer_parser: Parser
    opened: bool

    def __post_init__(self) -> None:
        if self.opened:
            self._state = "reasoning"
        else:
            self._state = "start"
        self._buffer = ""
        self._blank = True

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        result: list[Piece] = []
        if self._state == "start":
            start = self._buffer.lstrip()
            if start.startswith(OPENS):
                self._state, self._buffer = "reasoning", start[len(OPENS) :]
            elif OPENS.startswith(start):
                return []
            else:
                self._state = "content"
        if self._state == "reasoning":
            result += self._reasoning()
        if self._state == "after":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "content"
            else:
                self._state = "after"
        if self._state == "content":
            text = self._buffer
            self._buffer = ""
            result += self.answer_parser.feed(text)
        return result

    def _reasoning(self) -> list[Piece]:
        place = self._buffer.find(CLOSES)
        if place >= 0:
            text = self._buffer[:place].rstrip()
            self._buffer = self._buffer[place + len(CLOSES) :]
            self._state = "after"
        else:
            place = len(self._buffer) - count_held_back(self._buffer, [CLOSES])
            text = self._buffer[:place]
            self._buffer = self._buffer[place:]
        if self._blank:
            text = text.lstrip()
        self._blank = self._blank and not text
        if text:
            return [Piece(reasoning=text)]
        return []

    def close(self) -> list[Piece]:
        left = self._buffer
        self._buffer = ""
        if self._state == "reasoning":
            if self._blank:
                text = left.strip()
            else:
                text = left.rstrip()
            if text:
                return [Piece(reasoning=text)]
            return []
        return [
            *(self.answer_parser.feed(left) if left and self._state == "start" else []),
            *self.answer_parser.close(),
        ]
