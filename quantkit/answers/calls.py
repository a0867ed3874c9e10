"""Calls of tools in the text of an answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from quantkit.answers.pieces import Call, Piece, count_held_back


class Syntax(Protocol):
    """How a family of models writes calls.

    Attributes:
        opens: the text before calls.
        closes: the text after one, which may be missing; empty if there is none.
        bare: whether an answer that begins with an object is a call without `opens`.
        separator: what may come between two calls that share `opens`; None if each has its own.
        marks: all that are tokens in the vocabularies of such models.
    """

    opens: str
    closes: str
    bare: bool
    separator: str | None
    marks: tuple[str, ...]

    def start(self, text: str) -> int | None:
        """Find where the JSON value begins in the text after `opens`; None if that is not known
        yet, -1 if there is none.
        """
        ...

    def calls(self, head: str, value: str) -> list[Call] | None:
        """Parse the calls in a JSON value, with the text before it; None if the value is not a
        call.
        """
        ...


class _Scan:
    """Finds the end of a JSON object or list that arrives in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Find the place after the value's last bracket; None if the value continues."""
        # Only strings and the depth are tracked, not the grammar of JSON: `Syntax.calls` parses the
        # complete value, and what it cannot parse becomes content.
        for place, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._string:
                self._escaped = letter == "\\"
                self._string = letter != '"'
            elif letter == '"':
                self._string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


class CallParser:
    """A `Parser` of content and calls.

    Text that is no call of a known tool stays content, also a call that ends before it is complete.
    Space before and after calls is dropped.
    """

    def __init__(self, syntax: Syntax, names: Collection[str], *, parallel: bool = True) -> None:
        """
        Args:
            names: of the known tools.
            parallel: whether an answer may have several calls; otherwise further ones are dropped.
        """
        self._syntax, self._names, self._parallel = syntax, frozenset(names), parallel
        self._state = "text"
        self._started = False
        self._called = False
        self._closed = False
        # Text that no state has consumed yet.
        self._buffer = ""
        # What may become a call: `opens`, the text before the value, and parts of the value. The
        # parser keeps it because it is emitted as content if it turns out to be no call.
        self._raw: list[str] = []
        self._scan = _Scan()

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        readers = {
            "text": self._text,
            "head": self._head,
            "value": self._value,
            "after": self._after,
        }
        while readers[self._state](pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        unread = "".join(self._raw)
        # After a call, the buffer contains at most an incomplete mark that closes or separates
        # calls.
        if self._state != "after":
            unread += self._buffer
        self._raw = []
        self._buffer = ""
        if self._called and not unread.strip():
            return []
        return [Piece(unread)] if unread else []

    # Each state's method consumes what it can of the buffer. It returns True if the next state may
    # continue with the buffer, and False if more text is needed.

    def _text(self, pieces: list[Piece]) -> bool:
        opens = self._syntax.opens
        # A bare call is possible only at the beginning of the answer; later braces are content.
        if not self._started:
            start = self._buffer.lstrip()
            if self._syntax.bare and start.startswith("{"):
                self._raw = [""]
                self._state = "head"
                self._started = True
                return True
            if not start:
                return False
        place = self._buffer.find(opens)
        if place >= 0:
            self._emit(self._buffer[:place].rstrip(), pieces)
            self._raw = [opens]
            self._buffer = self._buffer[place + len(opens) :]
            self._state = "head"
            self._started = True
            return True
        # The end of the buffer may be the beginning of `opens`, so it is not emitted yet.
        count = count_held_back(self._buffer, [opens])
        self._started = True
        self._emit(self._buffer[: len(self._buffer) - count], pieces)
        self._buffer = self._buffer[len(self._buffer) - count :]
        return False

    def _head(self, pieces: list[Piece]) -> bool:
        place = self._syntax.start(self._buffer)
        if place is None:
            return False
        if place < 0:
            return self._give_up(pieces)
        self._raw += [self._buffer[:place], ""]
        self._buffer = self._buffer[place:]
        self._state = "value"
        self._scan = _Scan()
        return True

    def _value(self, pieces: list[Piece]) -> bool:
        end = self._scan.end(self._buffer)
        self._raw.append(self._buffer[:end])
        if end is None:
            self._buffer = ""
            return False
        self._buffer = self._buffer[end:]
        calls = self._syntax.calls(self._raw[1], "".join(self._raw[2:]))
        if not calls or not self._names.issuperset(call.name for call in calls):
            return self._give_up(pieces)
        for call in calls:
            # Without `parallel`, further calls are dropped, and their text does not become content.
            if self._parallel or not self._called:
                pieces.append(Piece(call=call))
            self._called = True
        self._raw = []
        self._state = "after"
        self._closed = False
        return True

    def _after(self, pieces: list[Piece]) -> bool:
        closes = self._syntax.closes
        separator = self._syntax.separator
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if closes and not self._closed:
            if self._buffer.startswith(closes):
                self._buffer = self._buffer[len(closes) :]
                self._closed = True
                return True
            # The buffer is an incomplete closing mark.
            if closes.startswith(self._buffer):
                return False
        if separator is not None:
            next_value = self._buffer.removeprefix(separator).lstrip()
            if not next_value:
                return False
            if next_value.startswith("{"):
                # Calls after a separator have no `opens`.
                self._raw = [""]
                self._buffer = next_value
                self._state = "head"
                return True
        self._state = "text"
        return True

    def _give_up(self, pieces: list[Piece]) -> bool:
        self._emit("".join(self._raw), pieces)
        self._raw = []
        self._state = "text"
        return True

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Piece(text))
