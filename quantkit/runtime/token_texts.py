"""The text of each single token."""

from __future__ import annotations

from quantkit.text.tokenizer import Tokenizer


class TokenTexts(dict[int, str]):
    """The text of each single token, decoded when it is first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__({token: text for text, token in (tokenizer.special_tokens or {}).items()})
        self.tokenizer = tokenizer
        self._special_tokens = frozenset(self)

    def __missing__(self, token: int) -> str:
        # A tokenizer may drop the space at the start of a text. The second of two equal tokens
        # keeps it.
        alone = self.tokenizer.decode([token])
        text = self.tokenizer.decode([token, token])[len(alone) :]
        self[token] = text
        return text

    def find_bytes(self, token: int) -> list[int] | None:
        """Find the bytes that a token adds to the text; None if they depend on the tokens before
        it.
        """
        text = self[token]
        token_bytes = self.tokenizer.token_bytes
        # A special token stands for its spelling, whatever bytes the vocabulary has for it.
        if token_bytes is not None and token not in self._special_tokens:
            return list(token_bytes.of(token) or b"")
        # A tokenizer without bytes decodes a part of a character to U+FFFD.
        if "\ufffd" in text:
            return None
        return list(text.encode(errors="surrogatepass"))
