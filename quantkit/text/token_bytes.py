"""Find the bytes that each token adds to text: a token may be a part of a character."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence


class TokenBytes:
    """The bytes that tokens add to text, in UTF-8, at any position.

    Attributes:
        of: the bytes of a token; None if it adds nothing, and no character continues across it.
        replaces_each_byte: whether each byte that belongs to no character becomes a separate
            U+FFFD, as in sentencepiece; otherwise those that begin the same character become one.
    """

    def __init__(self, read: Callable[[int], bytes | None], *, replaces_each_byte: bool) -> None:
        self.of: Callable[[int], bytes | None] = functools.cache(read)
        self.replaces_each_byte = replaces_each_byte


def fallback_bytes(
    vocabulary: Mapping[str, int],
    decode: Callable[[Sequence[int]], str],
    *,
    apart: Collection[int] = (),
) -> TokenBytes | None:
    """Find the bytes of a vocabulary of characters, and of tokens such as ``<0xE4>`` for the bytes
    of other characters.

    Args:
        vocabulary: at least the tokens for bytes.
        decode: the tokenizer's, which drops special tokens.
        apart: tokens that no character continues across.

    Returns:
        The bytes; None if `decode` does not turn such tokens into bytes.
    """
    values: dict[int, int] = {}
    for value in range(256):
        byte_token = vocabulary.get(f"<0x{value:02X}>")
        if byte_token is not None:
            values[byte_token] = value
    # The token of the byte "A": it shows whether such tokens are decoded to bytes.
    letter = vocabulary.get("<0x41>")
    if letter is None or decode([letter]) != "A":
        return None

    def read(token: int) -> bytes | None:
        if token in apart:
            return None
        if token in values:
            return bytes([values[token]])
        # Decoders drop spaces at the beginning and the end of text; a letter on each side keeps
        # them.
        return decode([letter, token, letter])[1:-1].encode()

    return TokenBytes(read, replaces_each_byte=True)


def letters_bytes(spelled: Callable[[int], str | None]) -> TokenBytes:
    """Find the bytes of a vocabulary that spells each byte with one of GPT-2's letters; `spelled`
    returns the spelling of a token, None for one that adds nothing.
    """
    values = {letter: value for value, letter in BYTE_LETTERS.items()}

    def read(token: int) -> bytes:
        text = spelled(token) or ""
        # Added tokens are spelled as in text, also with letters that stand for no byte.
        encoded = bytearray()
        for letter in text:
            if letter not in values:
                return text.encode()
            encoded.append(values[letter])
        return bytes(encoded)

    return TokenBytes(read, replaces_each_byte=False)


def spell_bytes(token: bytes) -> str:
    """Spell a token in GPT-2's letters."""
    return token.decode("latin-1").translate(BYTE_LETTERS)


# Printable bytes of Latin-1 are their own letters; the others get the letters from U+0100 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(_OTHERS)
}
"""GPT-2's printable letter for every byte."""
