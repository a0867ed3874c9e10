"""Do two tokenizers read texts as the same tokens?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from quantkit.text.tokenizer import Tokenizer

_SAMPLES = (
    "The quick brown fox, 1234567 jumps over $5.00 -- isn't it?",
    "  two leading spaces,\ttabs\tand\n\nnew lines  \n trailing ",
    "Größe, naïve café, Москва, 日本語のテキスト, عربى, 👩‍🚀🚀",
    "def f(x):\n    return {'a': x ** 2}  # comment\n",
    "<s> <unk> </s> <|begin_of_text|> <0x41>",
    "e\u0301 \u00e9 \ufb01 \u2167 \u00a0 \u200b \x00 \x7f",
)
_MOST_PIECES = 1 << 15  # of a vocabulary, evenly spaced
_NO_TEXT = "\ufffd"  # stands for bytes that are no text by themselves


def first_difference(first: Tokenizer, second: Tokenizer, texts: Iterable[str]) -> str | None:
    """The first of some texts, and of built-in samples before them, that two tokenizers read differently, if any; or
    a special token that they number differently."""
    own, others = (_as_spaces(one.special_tokens) for one in (first, second))
    if own is not None and others is not None and own != others:
        return min(spelling for spelling, _ in own.items() ^ others.items())
    return next((text for text in (*_SAMPLES, *texts) if first.encode(text) != second.encode(text)), None)


def _as_spaces(specials: Mapping[str, int] | None) -> dict[str, int] | None:
    """Tokens by their spellings; U+2581 in them is a space, as in GGUF."""
    return None if specials is None else {spelling.replace("\u2581", " "): n for spelling, n in specials.items()}


def vocabulary_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """The texts of a tokenizer's tokens, of some of them where they are very many."""
    for token in range(0, tokenizer.vocab_size, -(-tokenizer.vocab_size // _MOST_PIECES)):
        text = tokenizer.decode([token])
        if text and _NO_TEXT not in text:
            yield text
