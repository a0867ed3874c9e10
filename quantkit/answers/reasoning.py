"""Reasoning before an answer, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.answers.pieces import Parser, Piece, count_held_back
from quantkit.grammar.after_reasoning import Reasoning
from quantkit.text.tokenizer import Tokenizer

OPENS = "<think>"
CLOSES = "</think>"


def find_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> Reasoning | None:
    """Determine how the answer to a prompt may begin with reasoning; None if the vocabulary has no
    tokens for reasoning, or the prompt has closed it, as templates do to disable reasoning.
    """
    special_tokens = tokenizer.special_tokens or {}
    if OPENS not in special_tokens or CLOSES not in special_tokens:
        return None
    begin = special_tokens[OPENS]
    end = special_tokens[CLOSES]
    last = _find_last(prompt, (begin, end))
    # Marks that other text follows belong to earlier messages.
    if last is None or tokenizer.decode(prompt[last + 1 :], specials=True).strip():
        return Reasoning(begin, end, opened=False)
    if prompt[last] == begin:
        return Reasoning(begin, end, opened=True)
    return None


def _find_last(prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Find the last place in a prompt that contains one of the tokens; None if there is none."""
    for place in reversed(range(len(prompt))):
        if prompt[place] in tokens:
            return place
    return None


@dataclass
class ReasoningParser:
    """A `Parser` of reasoning, which passes the text after it to another parser. Space around the
    reasoning is dropped.

    Attributes:
        answer_parser: reads the text after the reasoning.
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
        # Only white space has been read of the reasoning.
        self._blank = True

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        if self._state == "start":
            start = self._buffer.lstrip()
            if start.startswith(OPENS):
                self._state = "reasoning"
                self._buffer = start[len(OPENS) :]
            # The mark may arrive in parts.
            elif OPENS.startswith(start):
                return []
            else:
                self._state = "content"
        if self._state == "reasoning":
            pieces += self._reasoning()
        if self._state == "after":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "content"
        if self._state == "content":
            text = self._buffer
            self._buffer = ""
            pieces += self.answer_parser.feed(text)
        return pieces

    def _reasoning(self) -> list[Piece]:
        place = self._buffer.find(CLOSES)
        if place >= 0:
            text = self._buffer[:place].rstrip()
            self._buffer = self._buffer[place + len(CLOSES) :]
            self._state = "after"
        else:
            # The end of the buffer may be the beginning of the mark, or space before it.
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
        unread = self._buffer
        self._buffer = ""
        if self._state == "reasoning":
            if self._blank:
                text = unread.strip()
            else:
                text = unread.rstrip()
            if text:
                return [Piece(reasoning=text)]
            return []
        pieces: list[Piece] = []
        # An answer that ends within an incomplete <think> is content.
        if unread and self._state == "start":
            pieces += self.answer_parser.feed(unread)
        return pieces + self.answer_parser.close()
