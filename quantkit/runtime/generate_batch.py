"""Continue many prompts, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Unpack

import torch

from quantkit.arguments import as_whole, require_flags, wrong_type
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.progress import Progress, heard
from quantkit.runtime.batch import Batch
from quantkit.runtime.completion import Completion
from quantkit.runtime.detokenizer import Detokenizer
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Generation
from quantkit.runtime.request import (
    BATCH_SIZE,
    MAX_NEW_TOKENS,
    Request,
    TokenIds,
    checked_request,
    checked_stop,
    prompt_ids,
    require_model,
    shortened,
    text_ids,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.text.tokenizer import Tokenizer


def generate_batch(
    model: Decoder | Engine,
    prompts: Sequence[str | TokenIds],
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    stop: str | Sequence[str] = (),
    n: int = 1,
    logprobs: int | None = None,
    echo: bool = False,
    truncate: bool = False,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
    **sampling: Unpack[SamplingOptions],
) -> list[Completion]:
    """Continue prompts, several at a time; each as if it were alone.

    Args:
        model: from `quantkit.load`, or an engine over it, whose slots are then used.
        prompts: texts, where there is a tokenizer, or token ids as `quantkit.generate` takes them.
        tokenizer: for prompts, results and stop strings as texts.
        max_new_tokens: at most so many for each; 0 scores prompts, with `echo` and `logprobs`.
        stop: strings at which a text ends; they are not part of it.
        n: continuations of each prompt, drawn with seeds that count up.
        logprobs: tell the log-probability of each new token, and of so many of the likeliest in its place.
        echo: let tokens, text and log-probabilities begin with the prompt's.
        truncate: cut too long a prompt at its beginning, but for the first token where that is BOS. Else it is
            refused.
        batch_size: sequences that run together at most; each takes its part of the cache. What comes of a prompt
            does not depend on it with the CPU kernels; elsewhere but for ties.
        progress: told of every prompt.
        sampling: how tokens are drawn, greedily by default: see `quantkit.generate`. All prompts have the same seed.

    Returns:
        The completions in the order of the prompts, `n` of each one after the other.

    Raises:
        RequestError: as `quantkit.generate`, for any of the prompts, before anything is computed.
        NonFiniteError: if the model's logits are NaN or Inf.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4")
        >>> for one in quantkit.generate_batch(model, ["Once", "My fellow"], tokenizer=tokenizer, stop="."):
        ...     print(one.text, one.finish_reason)
    """
    require_model("model", model, (Decoder, Engine))
    require_flags(echo=echo, truncate=truncate)
    decoder = model.model if isinstance(model, Engine) else model
    stops = checked_stop(stop, tokenizer)
    told = heard(progress)
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise wrong_type("prompts", prompts, "several prompts in a list")
    requests = []
    for prompt in prompts:
        ids = _ids(prompt, tokenizer, stops)
        if truncate:
            ids = shortened(decoder.config, ids, max_new_tokens)
        requests.append(
            checked_request(decoder.config, ids, max_new_tokens, sampling, samples=n, logprobs=logprobs, echo=echo)
        )
    if not requests:
        return []
    engine = model if isinstance(model, Engine) else engine_for(decoder, requests, batch_size)
    found: list[Completion] = []
    for one in completions(engine, requests, tokenizer, [stops] * len(requests)):
        found.append(one)
        told("generate", len(found), len(requests) * n, "completions")
    return sorted(found, key=lambda one: (one.prompt, one.sample))


def engine_for(
    model: Decoder, requests: Sequence[Request], batch_size: int, *, cache_dtype: torch.dtype | None = None,
    compiled: bool | None = None,
) -> Engine:  # fmt: skip
    """An engine that holds the longest of requests, and as many as run together.

    Args:
        cache_dtype, compiled: see `Engine`.

    Raises:
        RequestError: for no such number, or a cache that does not fit in memory.
    """
    slots = as_whole("batch_size", batch_size)
    if slots < 1:
        raise RequestError("batch_size must be at least 1", found=slots)
    samples = sum(one.samples for one in requests)
    longest = max(one.length for one in requests)
    return Engine(model, longest, slots=min(slots, samples), cache_dtype=cache_dtype, compiled=compiled)


def completions(
    engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None, stops: Sequence[Sequence[str]],
    counted: Callable[[int], None] | None = None,
) -> Generator[Completion, None, None]:  # fmt: skip
    """Completions of requests, each as soon as it ends.

    Args:
        stops: strings at which the text of each request ends.
        counted: told of so many new tokens after each step.
    """
    for request in requests:
        engine.require_length(request.length)
    batch = Batch(engine)
    waiting = deque(enumerate(requests))
    begun: dict[Generation, _Reader] = {}
    while waiting or begun:
        while waiting and len(begun) < 2 * engine.slots:  # enough to fill the slots that become free
            number, request = waiting.popleft()
            for one in batch.add(request):
                begun[one] = _Reader(number, one, tokenizer, stops[number])
        for one in batch.step():
            reader = begun[one]
            before = reader.tokens
            if reader.read():
                batch.end(one)
            if counted is not None:
                counted(reader.tokens - before)
            if one.finish_reason is not None:
                yield reader.completion()
                del begun[one]


class _Reader:
    """Turns the tokens of a continuation into text, as they come."""

    def __init__(
        self, number: int, generation: Generation, tokenizer: Tokenizer | None, stop: Sequence[str]
    ) -> None:  # fmt: skip
        self._number, self._of = number, generation
        self._text = None if tokenizer is None else Detokenizer(tokenizer, generation.request.prompt, stop)
        self._prompt = ""
        if tokenizer is not None and generation.request.echo:
            self._prompt = tokenizer.decode(generation.request.prompt)
        self._pieces: list[str] = []
        self.tokens = 0
        """New ones that are read."""

    def read(self) -> bool:
        """Read the tokens that are new; whether a stop string has come."""
        if self._text is None:
            self.tokens = len(self._of.tokens)
            return False
        while self.tokens < len(self._of.tokens) and self._text.stopped is None:
            self._pieces.append(self._text.add(self._of.tokens[self.tokens]))
            self.tokens += 1
        if self._of.finish_reason is not None:
            self._pieces.append(self._text.close())
        return self._text.stopped is not None

    def completion(self) -> Completion:
        """What has come, once it has ended."""
        request, reason = self._of.request, self._of.finish_reason
        assert reason is not None
        tokens, logprobs = self._of.tokens[: self.tokens], self._of.logprobs
        echoed = request.prompt if request.echo else []
        if logprobs is not None:
            logprobs = logprobs.cut(len(echoed) + self.tokens)
        stopped = None if self._text is None else self._text.stopped
        return Completion(
            self._number, self._of.sample, [*echoed, *tokens],
            None if self._text is None else self._prompt + "".join(self._pieces),
            reason if stopped is None else "stop", stopped, len(request.prompt), logprobs,
        )  # fmt: skip


def _ids(prompt: str | TokenIds, tokenizer: Tokenizer | None, stop: Sequence[str]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt_ids(prompt)
    if tokenizer is None:
        raise RequestError("a prompt is a text, and there is no tokenizer", hint="give `tokenizer`")
    return text_ids(tokenizer, prompt, specials=False)
