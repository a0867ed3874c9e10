"""Token by token to text, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from quantkit.text.token_bytes import TokenBytes
from quantkit.text.tokenizer import Tokenizer

# Decoders write this character for bytes that do not form one (yet).
_UNFINISHED = "\ufffd"
# The bytes of the longest character in UTF-8.
_LONGEST_CHARACTER = 4
# Tokens of the prompt that give the first new token its context, and the number of tokens after
# which an unfinished character is taken for invalid bytes.
_CONTEXT = 8
_NOTHING: Mapping[int, str] = {}


class Detokenizer:
    """The text that each token of a continuation adds: its tokens, decoded on their own. But the
    first space, which decoders drop, is kept, and a character that begins in the prompt is returned
    as a whole.

    A character that spans several tokens appears with the last of them, and bytes that form no
    character become U+FFFD. Text that may begin a stop string is withheld until later tokens
    decide. The cost of a token does not depend on its position.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        spelled: Mapping[int, str] = _NOTHING,
    ) -> None:
        """
        Args:
            prompt: may begin and end within a character.
            stop: strings; the text ends before the first one that occurs.
            spelled: the text of tokens that decode to nothing, such as special ones.
        """
        # The stop string that was found.
        self.found_stop: str | None = None
        self._stop = tuple(stop)
        self._spelled = spelled
        token_bytes = tokenizer.token_bytes
        self._texts: _ContextDecoder | _ByteDecoder
        if token_bytes is None:
            self._texts = _ContextDecoder(tokenizer, prompt)
        else:
            self._texts = _ByteDecoder(tokenizer, token_bytes, prompt)
        # Withheld text, which may begin a stop string.
        self._withheld = ""

    def add(self, token: int) -> str:
        """Append a token and return the text that it completes; nothing after a stop string."""
        spelling = self._spelled.get(token)
        if spelling is not None:
            # No character continues across such a token.
            return self._release_text(self._texts.end() + spelling)
        return self._release_text(self._texts.add(token))

    def close(self) -> str:
        """End the continuation and return the text that was withheld."""
        text = self._release_text(self._texts.end())
        if self.found_stop is None:
            text = text + self._withheld
            self._withheld = ""
        return text

    def _release_text(self, new: str) -> str:
        """Append text, look for stop strings, and return the text that none of them can change."""
        if self.found_stop is not None:
            return ""
        text = self._withheld + new
        matches: list[tuple[int, int, str]] = []
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0:
                matches.append((start, -len(stop), stop))
        if matches:
            # The one that begins first counts; of several that begin there, the longest.
            start, _, self.found_stop = min(matches)
            self._withheld = ""
            return text[:start]
        num_withheld = 0
        for stop in self._stop:
            num_withheld = max(num_withheld, _count_partial_stop(text, stop))
        end = len(text) - num_withheld
        self._withheld = text[end:]
        return text[:end]


def text_offsets(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], text: str
) -> list[int]:
    """Compute where each token begins in the text of a continuation, as `TextOffsets` does."""
    offset_counter = TextOffsets(tokenizer, prompt)
    offsets: list[int] = []
    for token in tokens:
        # A stop string may have cut the text off before the last tokens.
        offsets.append(min(offset_counter.add(token), len(text)))
    return offsets


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


class _ByteDecoder:
    """The text of tokens whose bytes are known."""

    def __init__(
        self, tokenizer: Tokenizer, token_bytes: TokenBytes, prompt: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        # Only decoders of sentencepiece drop a leading space; for others the text has begun.
        self._begun = not token_bytes.replaces_each_byte
        self._first: list[int] = []
        for token in prompt:
            if self._begun:
                break
            self._drop_leading_space(token, token_bytes.of(token) or b"")
        # A character that the prompt ends within is in its last bytes.
        last = b""
        for token in reversed(prompt):
            data = token_bytes.of(token)
            if data is None or len(last) >= _LONGEST_CHARACTER:
                break
            last = data + last
        self._characters = _Characters(last, token_bytes.replaces_each_byte)

    def add(self, token: int) -> str:
        data = self._token_bytes.of(token)
        # No character continues across such a token.
        if data is None:
            return self.end()
        return self._characters.add(self._drop_leading_space(token, data))

    def end(self) -> str:
        return self._characters.add(b"", final=True)

    def _drop_leading_space(self, token: int, data: bytes) -> bytes:
        """Remove from a token's bytes the space that decoders drop at the beginning of a text."""
        if self._begun or not data:
            return data
        # Two tokens suffice: until the text begins, earlier ones decode to nothing.
        self._first = [*self._first[-1:], token]
        text = self._tokenizer.decode(self._first)
        self._begun = text != ""
        if data.startswith(b" "):
            return text.encode()
        return data


class _Characters:
    """Decodes bytes in pieces.

    `before` ends with at least the last character before them; `replaces_each_byte` is that of
    `TokenBytes`.
    """

    def __init__(self, before: bytes, replaces_each_byte: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(
            _BYTEWISE if replaces_each_byte else "replace"
        )
        earlier = codecs.getincrementaldecoder("utf-8")("replace")
        earlier.decode(before)
        # The bytes of a character that begins before; empty if none does.
        self._torn = bytes(earlier.getstate()[0])
        # The bytes that came since, which may complete it.
        self._since = b""

    def add(self, data: bytes, final: bool = False) -> str:
        """Append bytes and decode the complete characters; all of them if the bytes are final."""
        if not self._torn:
            return self._decoder.decode(data, final)
        self._since += data
        num_missing = _width(self._torn[0]) - len(self._torn)
        first_character = self._torn + self._since[:num_missing]
        try:
            character = codecs.getincrementaldecoder("utf-8")().decode(first_character)
            if not character and not final:
                return ""
        except UnicodeDecodeError:
            character = ""
        if character:
            remaining = self._since[num_missing:]
        # The prompt's bytes form no character with these, which are decoded on their own.
        else:
            remaining = self._since
        self._torn = self._since = b""
        return character + self._decoder.decode(remaining, final)


class _ContextDecoder:
    """The text of tokens whose bytes are unknown: they are decoded with the tokens before them."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        count = _CONTEXT
        # A context that decodes to nothing would make the decoder drop the next space.
        while count < len(prompt) and not tokenizer.decode(prompt[-count:]).strip():
            count *= 2
        self._context = list(prompt[-count:])
        self._decoded_tokens = len(self._context)
        self._text = tokenizer.decode(self._context)

    def add(self, token: int) -> str:
        self._context.append(token)
        text = self._tokenizer.decode(self._context)
        num_pending = len(self._context) - self._decoded_tokens
        # Bytes that stay invalid for so many tokens are no character that later ones complete.
        if text.endswith(_UNFINISHED) and num_pending < _CONTEXT:
            return ""
        new_text = text[len(self._text) :]
        # The token is nothing, or a space that appears only before more text.
        if text == self._text:
            # A character has at most four tokens, so only the last four can still change the text.
            del self._context[self._decoded_tokens : -_LONGEST_CHARACTER]
            return ""
        # Each token is decoded a bounded number of times, whatever the length of the text.
        self._context = self._context[self._decoded_tokens :]
        self._text = self._tokenizer.decode(self._context)
        self._decoded_tokens = len(self._context)
        return new_text

    def end(self) -> str:
        before = self._text
        self._text = self._tokenizer.decode(self._context)
        return self._text[len(before) :]


def _width(first: int) -> int:
    """Compute the number of bytes of a character of several bytes in UTF-8, from its first one."""
    # The leading bits are 110, 1110 or 11110.
    if first < 0xE0:
        return 2
    if first < 0xF0:
        return 3
    return 4


def _replace_invalid_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace one invalid byte, as sentencepiece does; see `codecs.register_error`."""
    assert isinstance(error, UnicodeDecodeError)
    return _UNFINISHED, error.start + 1


_BYTEWISE = "quantkit.bytewise"
codecs.register_error(_BYTEWISE, _replace_invalid_byte)


def _count_partial_stop(text: str, stop: str) -> int:
    """Count the letters at the end of a text that may begin a stop string."""
    max_length = min(len(text), len(stop) - 1)
    for count in range(max_length, 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0
