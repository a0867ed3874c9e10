"""Text as it grows token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quantkit.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_WINDOW = 16


def text_pieces(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text each token adds; a character that spans tokens comes with its last one.

    Only the last few tokens are decoded anew each time, so the cost per token is constant.
    """
    context = list(prompt)
    told = len(context)
    shown = tokenizer.decode(context)
    for token in tokens:
        context.append(token)
        text = tokenizer.decode(context)
        if text.endswith(_UNFINISHED) and len(context) - told < _WINDOW:
            continue
        yield text[len(shown) :]
        if text != shown:  # a context of no text would make the next token look like the first
            context = context[told:]
            text = tokenizer.decode(context)
        shown, told = text, len(context)
    rest = tokenizer.decode(context)[len(shown) :]
    if rest:
        yield rest
