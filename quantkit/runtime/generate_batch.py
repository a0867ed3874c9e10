"""Continue many prompts, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol, Unpack, runtime_checkable

import torch

from quantkit.architectures.config import ModelConfig
from quantkit.base.arguments import (
    as_integer,
    is_several,
    require_flags,
    require_tokenizer,
    wrong_type,
)
from quantkit.base.messages import Message
from quantkit.base.progress import Progress, skip_repeated_reports
from quantkit.errors import RequestError
from quantkit.formats.folder import require_rows
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import Runner
from quantkit.runtime.generation import Continuation
from quantkit.runtime.reader import CompletionReader
from quantkit.runtime.request import (
    BATCH_SIZE,
    MAX_NEW_TOKENS,
    Completion,
    Request,
    TokenIds,
    check_stop_strings,
    create_request,
    prompt_ids,
    require_model,
    truncate_prompt,
    with_prompt,
)
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.runtime.scheduler import Scheduler
from quantkit.text.tokenizer import Tokenizer


@runtime_checkable
class BatchModel(Protocol):
    """A model that runs requests in its own way, such as through XLA."""

    @property
    def config(self) -> ModelConfig: ...
    def runner(self, slots: int) -> Runner[Any]: ...


def generate_batch(
    model: Decoder | Engine | BatchModel,
    prompts: Iterable[str | TokenIds],
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    stop: str | Sequence[str] = (),
    n: int = 1,
    logprobs: int | None = None,
    echo: bool = False,
    truncate: bool = False,
    specials: bool = False,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
    **sampling: Unpack[SamplingOptions],
) -> list[Completion]:
    """Continue prompts, several at a time, each as if it ran alone.

    Args:
        model: from `quantkit.load` or `load_xla`, or an engine over the first, whose slots are then
            used.
        prompts: texts, where there is a tokenizer, or token ids as `quantkit.generate` takes them.
        tokenizer: for prompts, results and stop strings as texts.
        max_new_tokens: the maximum for each; 0 scores prompts, with `echo` and `logprobs`.
        stop: strings that end a completion; they are not part of it.
        n: continuations of each prompt, up to 4096, drawn with seeds that count up.
        logprobs: return the log-probability of each new token, and of this many of the likeliest in
            its place; 0 is of the token alone.
        echo: let tokens, text and log-probabilities begin with the prompt's.
        truncate: cut too long a prompt at its beginning, but for the first token where that is BOS.
            Else it is refused.
        specials: whether spellings of special tokens in texts, such as ``<|eot_id|>``, mean those
            tokens. Not for texts that others wrote.
        batch_size: the maximum number of sequences that run together; each uses its part of the
            cache. With the CPU kernels for complete blocks, completions do not depend on it;
            elsewhere they do only after ties.
        progress: called for each prompt.
        sampling: how tokens are drawn, greedily by default: see `quantkit.generate`. All prompts
            have the same seed.

    Returns:
        The completions in the order of the prompts, `n` of each one after the other.

    Raises:
        RequestError: as `quantkit.generate`, for any of the prompts, before anything is computed.
        CheckpointError: if the tokenizer is another model's, with more tokens than this one knows.
        NonFiniteError: if the model's logits are NaN or Inf.

    Example:
        >>> model, tokenizer = quantkit.load("model-int4")
        >>> prompts = ["Once", "My fellow"]
        >>> for completion in quantkit.generate_batch(model, prompts, tokenizer=tokenizer):
        ...     print(completion.text, completion.finish_reason)
    """
    require_model("model", model, (Decoder, Engine, BatchModel))
    require_flags(echo=echo, truncate=truncate, specials=specials)
    engine = model if isinstance(model, Engine) else None
    if isinstance(model, Engine):
        config = model.model.config
    else:
        config = model.config
    # XLA runs sequences only up to the length at which rotary positions change.
    if isinstance(model, BatchModel):
        max_tokens = config.max_unscaled_context
    elif engine is None:
        max_tokens = config.max_positions
    else:
        max_tokens = engine.length
    if tokenizer is not None:
        require_tokenizer(tokenizer)
        require_rows(tokenizer, config.vocab_size)
    stops = check_stop_strings(stop, tokenizer)
    report = skip_repeated_reports(progress)
    slots = as_integer("batch_size", batch_size, 1)
    # The options of all prompts, checked once; the token 0 takes the place of a prompt.
    options = create_request(
        config, [0], max_new_tokens, sampling, samples=n, logprobs=logprobs, echo=echo
    )
    # A string is iterable too: its characters would become prompts.
    if isinstance(prompts, str) or not is_several(prompts):
        raise wrong_type("prompts", prompts, "several prompts in a list")
    requests: list[Request] = []
    # All prompts are checked before the first one is computed.
    for number, prompt in enumerate(prompts):
        try:
            if isinstance(prompt, str) and tokenizer is None:
                raise RequestError("a string prompt requires a tokenizer", hint="pass `tokenizer`")
            ids = prompt_ids(prompt, tokenizer, specials=specials)
            if truncate and ids:
                ids = truncate_prompt(ids, max_tokens, options.max_new_tokens, config.bos_token_id)
            request = with_prompt(config, options, ids)
            if engine is not None:
                engine.require_length(request.length)
            requests.append(request)
        except RequestError as error:
            problem = Message(f"prompt {number}: ", error.problem.removeprefix("the prompt "))
            raise error.restate(problem=problem) from error
    if not requests:
        return []
    runner = model if isinstance(model, Engine) else engine_for(model, requests, slots)
    finished: list[Completion] = []
    total = len(requests) * options.samples
    report("generate", 0, total, "completions")
    for completion in completions(runner, requests, tokenizer, [stops] * len(requests)):
        finished.append(completion)
        report("generate", len(finished), total, "completions")
    # Completions arrive in the order in which they end.
    return sorted(finished, key=lambda completion: (completion.prompt, completion.sample))


def engine_for(
    model: Decoder | BatchModel,
    requests: Sequence[Request],
    batch_size: int,
    *,
    cache_dtype: torch.dtype | None = None,
    compiled: bool | None = None,
) -> Engine | Runner[Any]:
    """Create an engine for the longest request and the number that run together, or a runner of
    the model.

    Raises:
        RequestError: as `Engine`, or if `batch_size` is below 1.
    """
    longest, slots = choose_engine_size(requests, batch_size)
    if isinstance(model, Decoder):
        return Engine(model, longest, slots=slots, cache_dtype=cache_dtype, compiled=compiled)
    return model.runner(slots)


def choose_engine_size(requests: Sequence[Request], batch_size: int) -> tuple[int, int]:
    """Choose the tokens of a sequence, and the sequences at the same time, that requests need.

    Raises `RequestError` if `batch_size` is below 1.
    """
    num_samples = sum(request.samples for request in requests)
    # More slots than continuations would only take memory.
    slots = min(as_integer("batch_size", batch_size, 1), num_samples)
    return max(request.length for request in requests), slots


def completions(
    engine: Engine | Runner[Any],
    requests: Sequence[Request],
    tokenizer: Tokenizer | None,
    stops: Sequence[Sequence[str]],
    counted: Callable[[int], None] | None = None,
) -> Generator[Completion, None, None]:
    """Run requests, and yield each completion as soon as it ends.

    Args:
        stops: for each request the strings at which its text ends.
        counted: called after each step with the number of new tokens of each continuation.
    """
    runner: Runner[Any] = Scheduler(engine) if isinstance(engine, Engine) else engine
    # A request that is too long is refused before anything is computed.
    for request in requests:
        runner.require_room(request)
    waiting = deque(enumerate(requests))
    readers: dict[Continuation, CompletionReader] = {}
    while waiting or readers:
        # Twice the slots: enough to fill the slots that become free, without a sampler and its
        # tensors for every request of a long file.
        while waiting and len(readers) < 2 * runner.max_running:
            number, request = waiting.popleft()
            for continuation in runner.add(request):
                readers[continuation] = CompletionReader(
                    number, continuation, tokenizer, stops[number]
                )
        for continuation in runner.step():
            reader = readers[continuation]
            num_read = reader.num_tokens
            if reader.read():
                runner.end(continuation)
            if counted is not None:
                counted(reader.num_tokens - num_read)
            if continuation.finish_reason is not None:
                yield reader.completion()
                del readers[continuation]
