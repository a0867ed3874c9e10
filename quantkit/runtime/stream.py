"""Text as it grows token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Unpack

from quantkit.arguments import require_flags, require_tokenizer
from quantkit.formats.folder import require_rows
from quantkit.model.decoder import Decoder
from quantkit.runtime.detokenizer import Detokenizer
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import generate
from quantkit.runtime.request import (
    MAX_NEW_TOKENS,
    TokenIds,
    checked_stop,
    prompt_ids,
    require_model,
    text_ids,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.text.tokenizer import Tokenizer


def stream(
    model: Decoder | Engine,
    tokenizer: Tokenizer,
    prompt: str | TokenIds,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    stop: str | Sequence[str] = (),
    specials: bool = False,
    **sampling: Unpack[SamplingOptions],
) -> Generator[str, None, None]:
    """Continue a prompt, piece of text by piece of text.

    Args:
        model, tokenizer: from `quantkit.load`; instead of the model also an engine over it.
        prompt: a string, or token ids in a list or a tensor [T] or [1, T].
        max_new_tokens, sampling: as for `quantkit.generate`; greedy by default.
        stop: strings that end the text; they are not returned.
        specials: whether spellings of special tokens in the prompt, such as ``<|eot_id|>``, mean those tokens. Not for
            text from other people.

    Returns:
        A generator of the text that each token adds, computed on demand; it may be closed at any time. The
        prompt is not repeated, and a character that spans tokens comes whole with the last of them: joined, the
        pieces are the text.

    Raises:
        RequestError, NonFiniteError: as `quantkit.generate`.
        CheckpointError: if the tokenizer is another model's, with more tokens than this one knows.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4")
        >>> for piece in quantkit.stream(model, tokenizer, "My fellow citizens"):
        ...     print(piece, end="", flush=True)
    """
    require_model("model", model, (Decoder, Engine))
    require_tokenizer(tokenizer)
    require_rows(tokenizer, (model.model if isinstance(model, Engine) else model).config.vocab_size)
    require_flags(specials=specials)
    ids = text_ids(tokenizer, prompt, specials=specials) if isinstance(prompt, str) else prompt_ids(prompt)
    stops = checked_stop(stop, tokenizer)
    tokens = generate(model, ids, max_new_tokens=max_new_tokens, **sampling)
    return text_pieces(tokenizer, ids, tokens, stops)


def text_pieces(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int], stop: Sequence[str] = ()
) -> Generator[str, None, None]:
    """The text each token adds, up to a stop string; see `Detokenizer`."""
    text = Detokenizer(tokenizer, prompt, stop)
    for token in tokens:
        if piece := text.add(token):
            yield piece
        if text.stopped is not None:
            return
    if rest := text.close():
        yield rest


class Pace:
    """How fast tokens come; it counts those that pass through `timed`, or are passed to `add`."""

    def __init__(self, *, at_once: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            at_once: tokens that come together with the first one.
            clock: returns seconds.
        """
        self.tokens = 0
        self._at_once = at_once
        self._clock = clock
        self._begun = self._first = self._last = 0.0

    def timed(self, tokens: Iterable[int]) -> Iterator[int]:
        """The tokens; time starts with the first request."""
        self.begin()
        for token in tokens:
            self.add(1)
            yield token

    def begin(self) -> None:
        """Let time run from now on."""
        self._begun = self._clock()

    def add(self, tokens: int) -> None:
        """Count this number of tokens."""
        if tokens:
            self._last = self._clock()
            self._first = self._first if self.tokens else self._last
            self.tokens += tokens

    @property
    def first_after(self) -> float | None:
        """Seconds to the first token."""
        return self._first - self._begun if self.tokens else None

    @property
    def rate(self) -> float | None:
        """Tokens a second once the first is there; None if there are too few."""
        spent = self._last - self._first
        return (self.tokens - self._at_once) / spent if spent > 0 and self.tokens > self._at_once else None

    def line(self) -> str:
        """For people: tokens, tokens a second once the first is there, seconds to that."""
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.rate is not None:
            parts.append(f"{self.rate:.1f} tokens/s")
        if self.first_after is not None:
            parts.append(f"first token after {self.first_after:.2f} s")
        return ", ".join(parts)
