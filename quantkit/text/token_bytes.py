"""What each token adds to a text, in bytes: a token need not be a whole character."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence


class TokenBytes:
    """The bytes that tokens add to a text, in UTF-8, wherever they stand in it.

    Attributes:
        bytewise: whether each byte that is of no character becomes U+FFFD by itself, as in sentencepiece; else those
            that begin one character become it together.
    """

    def __init__(self, read: Callable[[int], bytes | None], *, bytewise: bool) -> None:
        """
        Args:
            read: tells those of one token; see `of`.
        """
        self.bytewise = bytewise
        self._read = read
        self._found: dict[int, bytes | None] = {}

    def of(self, token: int) -> bytes | None:
        """The bytes of a token; None of one that adds nothing, and that no character goes across."""
        if token not in self._found:
            self._found[token] = self._read(token)
        return self._found[token]


def fallback_bytes(
    vocabulary: Mapping[str, int], decode: Callable[[Sequence[int]], str], *, apart: Collection[int] = ()
) -> TokenBytes | None:
    """Those of a vocabulary of whole characters, and of tokens such as ``<0xE4>`` for others' bytes.

    Args:
        vocabulary: at least the tokens for bytes.
        decode: the tokenizer's own; it drops special tokens.
        apart: tokens that no character goes across.

    Returns:
        They; None if such tokens mean no bytes to `decode`.
    """
    values = {token: value for value in range(256) if (token := vocabulary.get(f"<0x{value:02X}>")) is not None}
    letter = vocabulary.get("<0x41>")
    if letter is None or decode([letter]) != "A":
        return None

    def read(token: int) -> bytes | None:
        if token in apart:
            return None
        if token in values:
            return bytes([values[token]])
        # Decoders drop spaces where a text begins or ends: neither is here.
        return decode([letter, token, letter])[1:-1].encode()

    return TokenBytes(read, bytewise=True)


def letters_bytes(spelled: Callable[[int], str | None]) -> TokenBytes:
    """Those of a vocabulary that spells each byte with one of GPT-2's letters.

    Args:
        spelled: the spelling of a token; None of one that adds nothing.
    """
    values = {letter: value for value, letter in BYTE_LETTERS.items()}

    def read(token: int) -> bytes:
        text = spelled(token) or ""
        return bytes(values[letter] for letter in text) if all(letter in values for letter in text) else text.encode()

    return TokenBytes(read, bytewise=False)


def spelled_bytes(token: bytes) -> str:
    """A token's spelling in GPT-2's letters."""
    return token.decode("latin-1").translate(BYTE_LETTERS)


def _byte_letters() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


BYTE_LETTERS = _byte_letters()
"""GPT-2's printable letter for every byte."""
