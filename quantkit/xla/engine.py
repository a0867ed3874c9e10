"""Generate with a model on the devices that JAX finds. Each text has a row of the cache.

Prompts are padded to a bucket of lengths, and their number to a power of two. Then chunks of tokens
are generated until all texts have ended.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Unpack

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from quantkit.architectures.config import ModelConfig
from quantkit.base.memory import enough_memory
from quantkit.base.progress import Progress, silent
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import bucket as power_of_two
from quantkit.runtime.generate import iterate_new_tokens
from quantkit.runtime.generation import Continuation
from quantkit.runtime.request import (
    MAX_NEW_TOKENS,
    Request,
    TokenIds,
    check_total_length,
    create_prompt_logprobs_error,
    create_request,
    prompt_ids,
)
from quantkit.runtime.sampling import TokenLogprobs
from quantkit.runtime.sampling_params import SamplingOptions, SamplingParams
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import nonfinite_logits
from quantkit.xla.model import build_sharded_decoder
from quantkit.xla.programs import (
    CHUNK,
    NO_TOKEN,
    Drawn,
    Rows,
    Sampling,
    cache_shape,
    chunk_program,
    prefill_program,
)
from quantkit.xla.split import DeviceSplit
from quantkit.xla.weights import device_mesh, jax_dtype, load_state, zeros

_log = logging.getLogger(__name__)

# Buckets are powers of two from _MIN to _STEP, then multiples of _STEP. Each is compiled once, so
# there must be few.
_MIN = 32
_STEP = 512

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class XlaModel:
    """A decoder with its weights on devices, for generation; `dtype` is the dtype of activations
    and cache.
    """

    split: DeviceSplit
    mesh: Mesh
    decoder: Decoder
    state: dict[str, jax.Array]
    dtype: torch.dtype

    @property
    def config(self) -> ModelConfig:
        return self.split.config

    @property
    def tokens_at_once(self) -> int:
        """Return the number of tokens that `generate` yields together."""
        return CHUNK

    @property
    def first(self) -> bool:
        """Return whether this process prints for all hosts."""
        return bool(jax.process_index() == 0)

    @cached_property
    def prefill(self) -> Any:
        """Make the program of `prefill_program`, once."""
        return prefill_program(self.decoder, self.mesh)

    @cached_property
    def chunk(self) -> Callable[[int | None], Any]:
        """Return a function that makes the program of `chunk_program` for a number of
        log-probabilities, once for each number.
        """
        return cache(partial(chunk_program, self.decoder, self.mesh))

    def runner(self, slots: int) -> XlaBatch:
        """Make a runner for `quantkit.generate_batch`, with several sequences at once."""
        return XlaBatch(self, slots)

    def generate(
        self,
        ids: TokenIds,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[int]:
        """Generate tokens like `quantkit.generate`, but with other random numbers for a seed.

        Raises:
            RequestError, NonFiniteError: as `quantkit.generate`.
        """
        request = create_request(self.config, prompt_ids(ids), max_new_tokens, sampling)
        runner = self.runner(1)
        runner.require_room(request)
        return iterate_new_tokens(runner, request)


def load_on_devices(
    checkpoint: Checkpoint,
    *,
    devices: int | None = None,
    dtype: torch.dtype | None = None,
    multi_host: bool = False,
    progress: Progress = silent,
) -> XlaModel:
    """Load a checkpoint's weights to devices; quantized weights stay quantized.

    Args:
        devices: how many; None takes all.
        dtype: of activations and float weights; None is the checkpoint's own.
        multi_host: see `device_mesh`.

    Raises:
        RequestError: if there are too few devices, or they do not divide the heads.
        QuantkitError: as reading the checkpoint does.
    """
    if checkpoint.kv_cache is not None:
        _log.warning(
            "%s: XLA keeps keys and values in floating point and ignores the KV cache settings",
            checkpoint.path,
        )
    mesh = device_mesh(devices, multi_host=multi_host)
    split = DeviceSplit(checkpoint.config, schemes(checkpoint), mesh.size)
    dtype = dtype or DType(checkpoint.config.dtype).torch
    state = load_state(checkpoint, split, mesh, dtype, progress=progress)
    return XlaModel(
        split=split, mesh=mesh, decoder=build_sharded_decoder(split), state=state, dtype=dtype
    )


class CachedBatch:
    """Texts that start together and grow by chunks, each until it ends.

    Attributes:
        logits: [B, V], of the next tokens.
        running: whether a sequence has not ended.
    """

    def __init__(
        self,
        model: XlaModel,
        tokens: Array,
        lengths: Array,
        counts: Array,
        capacity: int,
        *,
        sampling: Sampling | None = None,
        penalized: bool = False,
        counted: bool = False,
        logprobs: int | None = None,
    ) -> None:
        """Run the prompts.

        Args:
            tokens: [B, T]; each row begins with a prompt, followed by padding.
            lengths: [B], of the prompts.
            counts: [B], the maximum number of new tokens of each sequence; 0 for unused rows.
            capacity: positions of the cache.
            sampling: how tokens are drawn; None takes the likeliest.
            penalized: whether tokens that a sequence already contains have a penalty.
            counted: whether new tokens have one, per occurrence or once.
            logprobs: also return log-probabilities, with this many of the likeliest tokens.

        Raises:
            RequestError: if the texts exceed the cache, or the cache does not fit in memory.
        """
        # Beyond the end of the cache, XLA would overwrite the last positions without an error.
        needed = max(tokens.shape[1], int((lengths + counts).max()))
        if needed > capacity:
            raise RequestError(
                "the texts exceed the cache", found=needed, expected=f"at most {capacity} positions"
            )
        self.running = True
        self._model = model
        self._sampling = sampling
        self._program = model.chunk(logprobs)
        self._ends = np.array(model.config.eos_token_ids, np.int32)
        self._rows = Rows(lengths.astype(np.int32), counts.astype(np.int32))
        if penalized:
            seen_mask = np.zeros((len(tokens), model.config.vocab_size), bool)
            for row, length in enumerate(lengths):
                seen_mask[row, tokens[row, :length]] = True
            self._rows = self._rows._replace(seen_mask=seen_mask)
        if counted:
            # The penalties of new tokens do not count the prompt.
            no_counts = np.zeros((len(tokens), model.config.vocab_size), np.int32)
            self._rows = self._rows._replace(counts=no_counts)
        shape = cache_shape(model.split, tokens.shape[0], capacity)
        dtype = jax_dtype(model.dtype)
        with enough_memory(None):
            keys: list[jax.Array] = []
            values: list[jax.Array] = []
            for _ in range(model.config.num_layers):
                keys.append(zeros(model.mesh, shape, dtype))
                values.append(zeros(model.mesh, shape, dtype))
            self._cache, self.logits = model.prefill(
                model.state, (keys, values), tokens.astype(np.int32), lengths.astype(np.int32)
            )

    def grow(self) -> Drawn:
        """Generate the next tokens of all texts, [steps, B]: a chunk, or fewer if all texts end
        earlier.

        Raises:
            NonFiniteError: if the logits of a sequence are NaN or Inf.
            RequestError: if there is too little memory.
        """
        with enough_memory(None):
            self._cache, self.logits, self._rows, drawn, steps = self._program(
                self._model.state, self._cache, self.logits, self._rows, self._ends, self._sampling
            )
        # Arrays always have the length of a chunk, of which the program filled `steps`.
        result: Drawn = jax.tree.map(lambda array: np.asarray(array)[: int(steps)], drawn)
        if not result.finite.all():
            raise nonfinite_logits()
        self.running = bool((np.asarray(self._rows.tokens_left) > 0).any())
        return result

    def end(self, row: int) -> None:
        """End a sequence on the device."""
        tokens_left = np.array(self._rows.tokens_left)
        tokens_left[row] = 0
        self._rows = self._rows._replace(tokens_left=tokens_left)
        self.running = bool(tokens_left.any())


class XlaBatch:
    """Runs requests, up to `slots` texts at once. The next texts start when all running texts have
    ended.
    """

    def __init__(self, model: XlaModel, slots: int) -> None:
        self.max_running = slots
        # The same size for fewer texts: XLA would compile another program for another size.
        self._rows = power_of_two(slots, 1)
        self._model = model
        self._waiting: deque[Continuation] = deque()
        self._running: list[Continuation] = []
        self._cached: CachedBatch | None = None

    def require_room(self, request: Request) -> None:
        """
        Raises:
            RequestError: if the programs do not support the request, or it needs more positions
                than have the same angles in all texts.
        """
        if request.scores_prompt:
            raise create_prompt_logprobs_error("echo")
        config = self._model.config
        check_total_length(
            config, request.prompt, request.max_new_tokens, config.max_unscaled_context
        )

    def add(self, request: Request) -> list[Continuation]:
        """Queue a request; returns its continuations."""
        result = [Continuation(request, number) for number in range(request.samples)]
        self._waiting.extend(result)
        return result

    def end(self, generation: Continuation) -> None:
        """End a continuation, waiting or running."""
        generation.finish_reason = generation.finish_reason or "stop"
        if generation in self._waiting:
            self._waiting.remove(generation)
        elif generation in self._running and self._cached is not None:
            self._cached.end(self._running.index(generation))

    def step(self) -> list[Continuation]:
        """Generate a chunk of each sequence; returns those that have new tokens or have ended.

        Raises:
            NonFiniteError: if the model's logits are NaN or Inf.
        """
        if self._cached is None or not self._cached.running:
            self._running = []
            while self._waiting and len(self._running) < self.max_running:
                self._running.append(self._waiting.popleft())
            if not self._running:
                return []
            self._cached = start_cached_batch(self._model, self._running, self._rows)
        drawn = self._cached.grow()
        unfinished: dict[int, Continuation] = {}
        for row, continuation in enumerate(self._running):
            if continuation.finish_reason is None:
                unfinished[row] = continuation
        for row, continuation in unfinished.items():
            self._take(continuation, jax.tree.map(lambda array, row=row: array[:, row], drawn))
        return list(unfinished.values())

    def _take(self, continuation: Continuation, drawn: Drawn) -> None:
        """Append the tokens drawn for a sequence, up to its end."""
        # The device knows the model's end tokens but no other reasons to stop, so it may have drawn
        # tokens after the end.
        for index, token in enumerate(drawn.tokens.tolist()):
            if token != NO_TOKEN and continuation.finish_reason is None:
                continuation.append(
                    token, _logprobs(continuation, drawn, index), self._model.config.eos_token_ids
                )
        if continuation.finish_reason is not None:
            self.end(continuation)


def _logprobs(continuation: Continuation, drawn: Drawn, index: int) -> TokenLogprobs | None:
    """Select the log-probabilities of one of the tokens drawn for a sequence, if requested."""
    count = continuation.request.logprobs
    if count is None:
        return None
    position = slice(index, index + 1)
    # The program computes as many likeliest tokens as any of the texts requests.
    return TokenLogprobs(
        torch.tensor(drawn.logprobs[position]),
        torch.tensor(drawn.top_logprobs[position, :count]),
        torch.tensor(drawn.top[position, :count]),
    )


def start_cached_batch(model: XlaModel, texts: Sequence[Continuation], rows: int) -> CachedBatch:
    """Start texts, one in each of the first rows, padded to buckets whose compiled programs also
    serve other texts.
    """
    # Unused rows have a prompt of one token, so that their attention is defined, and generate none.
    lengths = np.ones(rows, np.int64)
    counts = np.zeros(rows, np.int64)
    params = [SamplingParams()] * rows
    requested_logprobs: list[int] = []
    for row, text in enumerate(texts):
        lengths[row] = len(text.request.prompt)
        counts[row] = text.request.max_new_tokens
        params[row] = text.sampling
        if text.request.logprobs is not None:
            requested_logprobs.append(text.request.logprobs)
    # Beyond `max_unscaled_context`, some rotary scalings change.
    padded = min(round_up_to_bucket(int(lengths.max())), model.config.max_unscaled_context)
    tokens = np.zeros((rows, padded), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text.request.prompt)] = text.request.prompt
    penalized = any(param.needs_seen_tokens for param in params)
    counted = any(param.needs_counts for param in params)
    # Without sampling, the program is smaller and needs no seeds.
    sampling = None
    if not all(param.likeliest_only for param in params):
        sampling = Sampling.of(params, _draw_shared_seeds(params), model.config.vocab_size)
    logprobs: int | None = None
    if requested_logprobs:
        logprobs = min(max(requested_logprobs), model.config.vocab_size)
    return CachedBatch(
        model,
        tokens,
        lengths,
        counts,
        round_up_to_bucket(max(padded, int((lengths + counts).max()))),
        sampling=sampling,
        penalized=penalized,
        counted=counted,
        logprobs=logprobs,
    )


def round_up_to_bucket(length: int) -> int:
    """Round a length up to its bucket, at most twice as long, so that one compiled program serves
    many lengths.
    """
    if length <= _STEP:
        return power_of_two(length, _MIN)
    return -(-length // _STEP) * _STEP


def _draw_shared_seeds(params: Sequence[SamplingParams]) -> list[int]:
    """Draw a seed of 64 bits for each sequence without one, and share all seeds between hosts."""
    seeds: list[int] = []
    for param in params:
        seeds.append(secrets.randbits(64) if param.seed is None else param.seed % 2**64)
    # In two words, because JAX has no 64-bit integers by default.
    words = np.array([divmod(seed, 2**32) for seed in seeds], np.uint32)
    shared_seeds: list[int] = []
    for high, low in multihost_utils.broadcast_one_to_all(words).tolist():
        shared_seeds.append(high << 32 | low)
    return shared_seeds
