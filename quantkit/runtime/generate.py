"""Continue one prompt, token id by token id."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, TypeVar, Unpack

from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.generation import Continuation
from quantkit.runtime.request import MAX_NEW_TOKENS, Request, TokenIds, checked_request, prompt_ids, require_model
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.runtime.scheduler import Scheduler

T = TypeVar("T", bound=Continuation)


class Runner(Protocol[T]):
    """Runs requests, several at a time; `Scheduler` documents the methods."""

    @property
    def slots(self) -> int: ...
    def require(self, request: Request) -> None: ...
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
        ids: the token ids of the prompt, in a list or a tensor [T] or [1, T]; not empty. `quantkit.stream` takes and
            returns text instead.
        max_new_tokens: the maximum number of new tokens.
        sampling: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `logit_bias` and `seed`, see
            `quantkit.SamplingParams`; greedy by default. Processes that share the model draw the same tokens.

    Returns:
        A generator of the ids of new tokens, up to the model's end token, which is left out. Each token is computed
        when the generator is advanced; it may be closed at any time. Do not decode the tokens one by one: that breaks
        characters and loses spaces. `quantkit.stream` decodes them correctly.

    Raises:
        RequestError: at once, if the prompt is a string, is empty, contains unknown ids, or with the new tokens exceeds
            the model's context or the engine.
        NonFiniteError: if the model's logits are NaN or Inf.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4")
        >>> ids = tokenizer.encode("My fellow citizens")
        >>> print(tokenizer.decode(list(quantkit.generate(model, ids, max_new_tokens=50))))
    """
    require_model("model", model, (Decoder, Engine))
    decoder = model.model if isinstance(model, Engine) else model
    request = checked_request(decoder.config, prompt_ids(ids), max_new_tokens, sampling)
    if isinstance(model, Engine):
        model.require_length(request.length)
    return new_tokens(Scheduler(model if isinstance(model, Engine) else Engine(model, request.length)), request)


def new_tokens(runner: Runner[Any], request: Request) -> Generator[int, None, None]:
    """The new tokens of a request that runs alone.

    Inference mode is left before each `yield`: it belongs to the thread, and a generator that is not run to its end may
    be closed when torch is gone.
    """
    (found,) = runner.add(request)
    count = 0
    while found.finish_reason is None:
        runner.step()
        yield from found.tokens[count:]
        count = len(found.tokens)
