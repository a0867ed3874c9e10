"""Token by token to text, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_WINDOW = 16


class Detokenizer:
    """The text that each token of a continuation adds.

    A character that spans tokens comes whole with its last one. What may begin a stop string is held back until that
    is known. Only the last few tokens are decoded anew each time, so a token costs the same anywhere.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        """
        Args:
            prompt: tokens that come before.
            stop: strings at which the text ends, of which nothing is given out.
        """
        self.stopped: str | None = None
        """The stop string that was found."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._context = list(prompt)
        self._told = len(self._context)
        self._shown = tokenizer.decode(self._context)
        self._back = ""  # text that is held back

    def add(self, token: int) -> str:
        """The text that a token adds, as far as it can be given out; nothing once a stop string is found."""
        self._context.append(token)
        text = self._tokenizer.decode(self._context)
        if text.endswith(_UNFINISHED) and len(self._context) - self._told < _WINDOW:
            return ""
        new = text[len(self._shown) :]
        if text != self._shown:  # a context of no text would make the next token look like the first
            self._context = self._context[self._told :]
            text = self._tokenizer.decode(self._context)
        self._shown, self._told = text, len(self._context)
        return self._given(new)

    def close(self) -> str:
        """What is left, when no more tokens come."""
        found = self._given(self._tokenizer.decode(self._context)[len(self._shown) :])
        self._shown = self._tokenizer.decode(self._context)
        if self.stopped is None:
            found, self._back = found + self._back, ""
        return found

    def _given(self, new: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._back + new
        found = [(place, -len(stop), stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, _, self.stopped = min(found)
            self._back = ""
            return text[:place]
        held = max((_begun(text, stop) for stop in self._stop), default=0)
        self._back = text[len(text) - held :]
        return text[: len(text) - held]


def _begun(text: str, stop: str) -> int:
    """Letters at the end of a text that may begin a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((count for count in range(most, 0, -1) if text.endswith(stop[:count])), 0)
