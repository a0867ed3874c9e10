"""Text as it grows token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.request import MAX_NEW_TOKENS, TokenIds, prompt_ids
from quantkit.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_WINDOW = 16


def stream(
    model: Decoder | Engine,
    tokenizer: Tokenizer,
    prompt: str | TokenIds,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    specials: bool = False,
) -> Iterator[str]:
    """Continue a prompt, piece of text by piece of text.

    Args:
        model, tokenizer: from `quantkit.load`; instead of the model also an engine over it.
        prompt: a text, or token ids in a list or a tensor [T] or [1, T].
        max_new_tokens, temperature, top_p, seed: as for `quantkit.generate`; greedy by default.
        specials: whether spellings of special tokens in a text, such as ``<|eot_id|>``, mean those tokens. Not for a
            text that others wrote.

    Returns:
        An iterator over the text that each token adds, computed as it is asked for. The prompt is not repeated, and
        a character that spans tokens comes whole with the last of them: joined, the pieces are the text.

    Raises:
        RequestError, NonFiniteError: as `quantkit.generate`.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4")
        >>> for piece in quantkit.stream(model, tokenizer, "My fellow citizens"):
        ...     print(piece, end="", flush=True)
    """
    ids = text_ids(tokenizer, prompt, specials=specials) if isinstance(prompt, str) else prompt_ids(prompt)
    tokens = generate(model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return filter(None, text_pieces(tokenizer, ids, tokens))


def text_ids(tokenizer: Tokenizer, text: str, *, specials: bool) -> list[int]:
    """The token ids of a prompt given as text.

    Raises:
        RequestError: if it is empty, or no Unicode.
    """
    if not text:
        raise RequestError("the prompt is empty")
    return tokenizer.encode(text, specials=specials)


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


class Pace:
    """How fast tokens come; it counts those that pass through `timed`."""

    def __init__(self, *, at_once: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            at_once: tokens that come together with the first one.
            clock: tells seconds.
        """
        self.tokens = 0
        self._at_once = at_once
        self._clock = clock
        self._begun = self._first = self._last = 0.0

    def timed(self, tokens: Iterable[int]) -> Iterator[int]:
        """The tokens; time runs from when the first is asked for."""
        self._begun = self._clock()
        for token in tokens:
            self._last = self._clock()
            if not self.tokens:
                self._first = self._last
            self.tokens += 1
            yield token

    def line(self) -> str:
        """For people: tokens, tokens a second once the first is there, seconds to that."""
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if (spent := self._last - self._first) > 0 and self.tokens > self._at_once:
            parts.append(f"{(self.tokens - self._at_once) / spent:.1f} tokens/s")
        if self.tokens:
            parts.append(f"first token after {self._first - self._begun:.2f} s")
        return ", ".join(parts)
