"""Continue one prompt: `generate` returns token ids, `stream` text."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, Unpack

from quantkit.base.arguments import require_flags, require_tokenizer
from quantkit.formats.folder import require_rows
from quantkit.model.decoder import Decoder
from quantkit.runtime.detokenizer import Detokenizer
from quantkit.runtime.engine import Engine, require_decoder
from quantkit.runtime.generation import Continuation
from quantkit.runtime.request import (
    MAX_NEW_TOKENS,
    Request,
    TokenIds,
    check_stop_strings,
    create_request,
    prompt_ids,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.runtime.scheduler import Scheduler
from quantkit.text.tokenizer import Tokenizer

T = TypeVar("T", bound=Continuation)


class Runner(Protocol[T]):
    """Runs requests, several at a time; `Scheduler` documents the methods."""

    @property
    def max_running(self) -> int: ...
    def require_room(self, request: Request) -> None: ...
    def add(self, request: Request) -> list[T]: ...
    def step(self) -> list[T]: ...
    def end(self, generation: T) -> None: ...


def generate(
    model: Decoder | Engine,
    ids: TokenIds,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    **sampling: Unpack[SamplingOptions],
) -> Generator[int, None, None]:
    """Continue a prompt, token by token.

    Args:
        model: from `quantkit.load`, or an engine over it, to choose how it runs.
        ids: the token ids of the prompt, in a list or a tensor [T] or [1, T]; not empty.
            `quantkit.stream` takes and returns text instead.
        max_new_tokens: the maximum number of new tokens.
        sampling: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`,
            `presence_penalty`, `frequency_penalty`, `logit_bias` and `seed`, see
            `quantkit.SamplingParams`; greedy by default. Processes that share the model draw the
            same tokens.

    Returns:
        A generator of the ids of new tokens, up to the model's end token, which is left out. Each
        token is computed when the generator is advanced; it may be closed at any time. Do not
        decode the tokens one by one: that breaks characters and loses spaces. `quantkit.stream`
        decodes them correctly.

    Raises:
        RequestError: at once, if the prompt is a string, is empty, contains unknown ids, or with
            the new tokens exceeds the model's context or the engine.
        NonFiniteError: if the model's logits are NaN or Inf.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4")
        >>> ids = tokenizer.encode("My fellow citizens")
        >>> print(tokenizer.decode(list(quantkit.generate(model, ids, max_new_tokens=50))))
    """
    config = require_decoder(model).config
    request = create_request(config, prompt_ids(ids), max_new_tokens, sampling)
    if isinstance(model, Engine):
        engine = model
    else:
        engine = Engine(model, request.length)
    engine.require_length(request.length)
    return iterate_new_tokens(Scheduler(engine), request)


def iterate_new_tokens(runner: Runner[Any], request: Request) -> Generator[int, None, None]:
    """Yield the new tokens of a request that runs alone.

    Inference mode is left before each `yield`: it belongs to the thread, and a generator that is
    not run to its end may be closed when torch is gone.
    """
    (generation,) = runner.add(request)
    count = 0
    while generation.finish_reason is None:
        # A step adds no token while it reads a prompt, and several if proposals are accepted.
        runner.step()
        yield from generation.tokens[count:]
        count = len(generation.tokens)


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
    """Continue a prompt, and yield the text piece by piece.

    Args:
        model, tokenizer: from `quantkit.load`; instead of the model also an engine over it.
        prompt: a string, or token ids in a list or a tensor [T] or [1, T].
        max_new_tokens, sampling: as for `quantkit.generate`; greedy by default.
        stop: strings that end the text; they are not returned.
        specials: whether spellings of special tokens in the prompt, such as ``<|eot_id|>``, mean
            those tokens. Not for text from other people.

    Returns:
        A generator of the text that each token adds, computed on demand; it may be closed at any
        time. The prompt is not repeated. A character that spans several tokens appears with the
        last of them, so the joined pieces are the text.

    Raises:
        RequestError, NonFiniteError: as `quantkit.generate`.
        CheckpointError: if the tokenizer is another model's, with more tokens than this one knows.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4")
        >>> for piece in quantkit.stream(model, tokenizer, "My fellow citizens"):
        ...     print(piece, end="", flush=True)
    """
    config = require_decoder(model).config
    # All arguments are checked here: a generator would raise only when it is advanced.
    require_tokenizer(tokenizer)
    require_rows(tokenizer, config.vocab_size)
    require_flags(specials=specials)
    ids = prompt_ids(prompt, tokenizer, specials=specials)
    stops = check_stop_strings(stop, tokenizer)
    tokens = generate(model, ids, max_new_tokens=max_new_tokens, **sampling)
    return text_pieces(tokenizer, ids, tokens, stops)


def text_pieces(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int], stop: Sequence[str] = ()
) -> Generator[str, None, None]:
    """Yield the text each token adds, up to a stop string; see `Detokenizer`."""
    detokenizer = Detokenizer(tokenizer, prompt, stop)
    for token in tokens:
        # A token within a character, or within a possible stop string, adds no text yet.
        if piece := detokenizer.add(token):
            yield piece
        if detokenizer.found_stop is not None:
            return
    if piece := detokenizer.close():
        yield piece


class Pace:
    """Measures the speed of tokens that pass through `time_tokens`, or are counted by `add`."""

    def __init__(self, *, at_once: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            at_once: tokens that arrive together with the first one, of sequences that run together.
            clock: returns seconds.
        """
        self.num_tokens = 0
        self._at_once = at_once
        self._clock = clock
        self._begun = self._first = self._last = 0.0

    def time_tokens(self, tokens: Iterable[int]) -> Iterator[int]:
        """Yield the tokens; time starts with the first request."""
        self.begin()
        for token in tokens:
            self.add(1)
            yield token

    def begin(self) -> None:
        """Start the clock."""
        self._begun = self._clock()

    def add(self, count: int) -> None:
        """Count this number of tokens."""
        # A call without tokens must not move the time of the last one.
        if count:
            self._last = self._clock()
            if not self.num_tokens:
                self._first = self._last
            self.num_tokens += count

    @property
    def first_after(self) -> float | None:
        """Compute the seconds to the first token; None before it."""
        if self.num_tokens:
            return self._first - self._begun
        return None

    @property
    def rate(self) -> float | None:
        """Compute tokens per second after the first token; None if there are too few."""
        # The time to the first token is that of the prompt, which `first_after` tells.
        decode_seconds = self._last - self._first
        if decode_seconds > 0 and self.num_tokens > self._at_once:
            return (self.num_tokens - self._at_once) / decode_seconds
        return None

    def line(self) -> str:
        """Format for people: tokens, tokens per second, and seconds to the first token."""
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.rate is not None:
            parts.append(f"{self.rate:.1f} tokens/s")
        if self.first_after is not None:
            parts.append(f"first token after {self.first_after:.2f} s")
        return ", ".join(parts)
