"""Token by token to text, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from quantkit.text.token_bytes import TokenBytes
from quantkit.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes
_CONTEXT = 8  # tokens
_NOTHING: Mapping[int, str] = {}


class Detokenizer:
    """The text that each token of a continuation adds: its tokens, decoded on their own. But the
    first space, which decoders drop, is kept, and a character that begins in the prompt is returned
    as a whole.

    A character that spans tokens comes with its last one, and bytes that make none are U+FFFD. What
    may begin a stop string is held back until that is known. A token costs the same anywhere.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        spelled: Mapping[int, str] = _NOTHING,
    ) -> None:
        """The prompt may begin and end within a character; the text ends before the first `stop`
        string. `spelled` are tokens that are shown so, such as special ones, which add no text
        otherwise.
        """
        # The stop string that was found.
        self.stopped: str | None = None
        self._stop = tuple(stop)
        self._spelled = spelled
        known = tokenizer.token_bytes
        self._texts = (
            _Whole(tokenizer, prompt) if known is None else _Bytes(tokenizer, known, prompt)
        )
        # Text that is held back.
        self._back = ""

    def add(self, token: int) -> str:
        """Return the text that a token adds, as far as it can be given out; nothing once a stop
        string is found.
        """
        if (spelling := self._spelled.get(token)) is not None:
            return self._release_text(self._texts.end() + spelling)
        return self._release_text(self._texts.add(token))

    def close(self) -> str:
        """Return what is left, when no more tokens come."""
        result = self._release_text(self._texts.end())
        if self.stopped is None:
            result = result + self._back
            self._back = ""
        return result

    def _release_text(self, new: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._back + new
        found = [
            (place, -len(stop), stop) for stop in self._stop if (place := text.find(stop)) >= 0
        ]
        if found:
            place, _, self.stopped = min(found)
            self._back = ""
            return text[:place]
        held = max((_count_partial_stop(text, stop) for stop in self._stop), default=0)
        self._back = text[len(text) - held :]
        return text[: len(text) - held]


def text_offsets(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], text: str
) -> list[int]:
    """Return where each token begins in the text of a continuation, as `TextOffsets` does."""
    offsets = TextOffsets(tokenizer, prompt)
    # a stop string may have cut it off
    result: list[int] = []
    for token in tokens:
        result.append(min(offsets.add(token), len(text)))
    return result


class TextOffsets:
    """Where tokens begin in the text of a continuation; one without text begins where the next
    one does.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self.end = 0

    def add(self, token: int) -> int:
        """Append a token, and return where it begins."""
        start = self.end
        self.end += len(self._detokenizer.add(token))
        return start


class _Bytes:
    """The text of tokens whose bytes are known."""

    def __init__(
        self, tokenizer: Tokenizer, token_bytes: TokenBytes, prompt: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        # Vocabularies of bytes drop no space.
        self._begun = not token_bytes.bytewise
        self._first: list[int] = []
        for token in prompt:
            if self._begun:
                break
            self._drop_leading_space(token, token_bytes.of(token) or b"")
        last = b""
        for token in reversed(prompt):
            data = token_bytes.of(token)
            if data is None or len(last) >= _LONGEST_CHARACTER:
                break
            last = data + last
        self._characters = _Characters(last, token_bytes.bytewise)

    def add(self, token: int) -> str:
        data = self._token_bytes.of(token)
        if data is None:
            return self.end()
        return self._characters.add(self._drop_leading_space(token, data))

    def end(self) -> str:
        return self._characters.add(b"", final=True)

    def _drop_leading_space(self, token: int, data: bytes) -> bytes:
        """Return what is left of a token's bytes: decoders drop spaces at the beginning."""
        if self._begun or not data:
            return data
        self._first = [*self._first[-1:], token]
        text = self._tokenizer.decode(self._first)
        self._begun = text != ""
        if data.startswith(b" "):
            return text.encode()
        return data


class _Characters:
    """Decodes bytes as they come; `before` ends with at least the last character before them,
    `bytewise` is that of `TokenBytes`.
    """

    def __init__(self, before: bytes, bytewise: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(_BYTEWISE if bytewise else "replace")
        earlier = codecs.getincrementaldecoder("utf-8")("replace")
        earlier.decode(before)
        self._torn = bytes(earlier.getstate()[0])  # of a character that began before
        self._since = b""

    def add(self, data: bytes, final: bool = False) -> str:
        """Return the characters that become whole; all that is left, where no more bytes come."""
        if not self._torn:
            return self._decoder.decode(data, final)
        self._since += data
        left = _width(self._torn[0]) - len(self._torn)
        try:
            character = codecs.getincrementaldecoder("utf-8")().decode(
                self._torn + self._since[:left]
            )
            if not character and not final:
                return ""
        except UnicodeDecodeError:
            character = ""
        if character:
            rest = self._since[left:]
        else:
            rest = self._since
        self._torn = self._since = b""
        return character + self._decoder.decode(rest, final)


class _Whole:
    """The text of tokens that are decoded with those before them: anything else may depend on
    them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        count = _CONTEXT
        while count < len(prompt) and not tokenizer.decode(prompt[-count:]).strip():
            count *= 2
        self._context = list(prompt[-count:])
        self._decoded_tokens = len(self._context)
        self._text = tokenizer.decode(self._context)

    def add(self, token: int) -> str:
        self._context.append(token)
        text = self._tokenizer.decode(self._context)
        if text.endswith(_UNFINISHED) and len(self._context) - self._decoded_tokens < _CONTEXT:
            return ""
        new = text[len(self._text) :]
        # A space that shows once more follows, or nothing.
        if text == self._text:
            del self._context[self._decoded_tokens : -_LONGEST_CHARACTER]
            return ""
        self._context = self._context[self._decoded_tokens :]
        self._text, self._decoded_tokens = self._tokenizer.decode(self._context), len(self._context)
        return new

    def end(self) -> str:
        before = self._text
        self._text = self._tokenizer.decode(self._context)
        return self._text[len(before) :]


def _width(first: int) -> int:
    """Bytes of a character, by its first one."""
    if first < 0xE0:
        return 2
    if first < 0xF0:
        return 3
    return 4


def _replace_invalid_byte(error: UnicodeError) -> tuple[str, int]:
    """Return a byte that is of no character."""
    assert isinstance(error, UnicodeDecodeError)
    return _UNFINISHED, error.start + 1


_BYTEWISE = "quantkit.bytewise"
codecs.register_error(_BYTEWISE, _replace_invalid_byte)


def _count_partial_stop(text: str, stop: str) -> int:
    """Letters at the end of a text that may begin a stop string."""
    max_length = min(len(text), len(stop) - 1)
    return next((count for count in range(max_length, 0, -1) if text.endswith(stop[:count])), 0)
