"""A model over the devices that JAX finds, and generation with it: texts in its cache, one row for
each.

Prompts are padded to a bucket of lengths, and their number to a power of two; then come chunks of
tokens, until all texts have ended.
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
from quantkit.runtime.generate import new_tokens
from quantkit.runtime.generation import Continuation
from quantkit.runtime.request import (
    MAX_NEW_TOKENS,
    Request,
    TokenIds,
    check_total_length,
    create_request,
    no_prompt_logprobs,
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

# buckets are powers of two from the one to the other, then multiples of it
_MIN = 32
_STEP = 512

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class XlaModel:
    """A decoder that generates, with its weights on devices; `dtype` is the type of activations
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
        """Tokens that `generate` gives out together."""
        return CHUNK

    @property
    def first(self) -> bool:
        """Return whether this process speaks for those of all hosts."""
        return bool(jax.process_index() == 0)

    @cached_property
    def prefill(self) -> Any:
        """Return the program of `prefill_program`."""
        return prefill_program(self.decoder, self.mesh)

    @cached_property
    def chunk(self) -> Callable[[int | None], Any]:
        """Makes the program of `chunk_program` for a number of log-probabilities, once."""
        return cache(partial(chunk_program, self.decoder, self.mesh))

    def runner(self, slots: int) -> XlaBatch:
        """Return what `quantkit.generate_batch` runs requests with, several sequences at once."""
        return XlaBatch(self, slots)

    def generate(
        self,
        ids: TokenIds,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[int]:
        """Return what `quantkit.generate` does. The same seed draws other tokens than there.

        Raises:
            RequestError, NonFiniteError: as there.
        """
        request = create_request(self.config, prompt_ids(ids), max_new_tokens, sampling)
        runner = self.runner(1)
        runner.require(request)
        return new_tokens(runner, request)


def model_on_devices(
    checkpoint: Checkpoint,
    *,
    devices: int | None = None,
    dtype: torch.dtype | None = None,
    multi_host: bool = False,
    progress: Progress = silent,
) -> XlaModel:
    """Put a checkpoint's weights on devices; quantized ones stay quantized.

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
            "%s: keys and values are floats in XLA, not as the folder's KV cache has them",
            checkpoint.path,
        )
    mesh = device_mesh(devices, multi_host=multi_host)
    split = DeviceSplit(checkpoint.config, schemes(checkpoint), mesh.size)
    dtype = dtype or DType(checkpoint.config.dtype).torch
    state = load_state(checkpoint, split, mesh, dtype, progress=progress)
    return XlaModel(split, mesh, build_sharded_decoder(split), state, dtype)


class CachedBatch:
    """Texts that begin together and grow by chunks, each until it ends.

    Attributes:
        logits: [B, V], of what follows.
        running: whether there is a sequence that has not ended.
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
            tokens: [B, T], of which the first tokens of each row, as many as its length [B], are a
                prompt and the others padding.
            counts: [B], tokens that each sequence gets at most; 0 where a row has none.
            capacity: positions that the cache has.
            sampling: how tokens are drawn; None takes the likeliest.
            penalized: whether tokens that a sequence holds already have a penalty.
            counted: whether new tokens have one, for each time or all together.
            logprobs: also return log-probabilities, with this many of the likeliest tokens.

        Raises:
            RequestError: if the texts are more than that, or the cache does not fit in memory.
                Beyond the cache's end XLA would write over its last positions, without a word.
        """
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
            seen = np.zeros((len(tokens), model.config.vocab_size), bool)
            for row, length in enumerate(lengths):
                seen[row, tokens[row, :length]] = True
            self._rows = self._rows._replace(seen_mask=seen)
        if counted:
            self._rows = self._rows._replace(
                counts=np.zeros((len(tokens), model.config.vocab_size), np.int32)
            )
        shape = cache_shape(model.split, tokens.shape[0], capacity)
        layers = range(model.config.num_layers)
        with enough_memory(None):
            cache = tuple(
                [zeros(model.mesh, shape, jax_dtype(model.dtype)) for _ in layers] for _ in range(2)
            )
            self._cache, self.logits = model.prefill(
                model.state, cache, tokens.astype(np.int32), lengths.astype(np.int32)
            )

    def grow(self) -> Drawn:
        """Return the next tokens of all texts, [steps, B]: a chunk of them, or fewer if all texts
        end before.

        Raises:
            NonFiniteError: if the logits of a sequence are NaN or Inf.
            RequestError: if there is too little memory.
        """
        with enough_memory(None):
            self._cache, self.logits, self._rows, drawn, steps = self._program(
                self._model.state, self._cache, self.logits, self._rows, self._ends, self._sampling
            )
        result: Drawn = jax.tree.map(lambda array: np.asarray(array)[: int(steps)], drawn)
        if not result.finite.all():
            raise nonfinite_logits()
        self.running = bool((np.asarray(self._rows.tokens_left) > 0).any())
        return result

    def end(self, row: int) -> None:
        """Let a sequence get no more tokens."""
        left = np.array(self._rows.tokens_left)
        left[row] = 0
        self._rows = self._rows._replace(tokens_left=left)
        self.running = bool(left.any())


class XlaBatch:
    """Runs requests, up to `slots` texts at once; the next ones begin when all of these have
    ended.
    """

    def __init__(self, model: XlaModel, slots: int) -> None:
        self.slots = slots
        # Also where fewer texts are left: another size would be compiled.
        self._rows = power_of_two(slots, 1)
        self._model = model
        self._waiting: deque[Continuation] = deque()
        self._running: list[Continuation] = []
        self._cached: CachedBatch | None = None

    def require(self, request: Request) -> None:
        """
        Raises:
            RequestError: if it requests what no program does, or for more positions than have the
                same angles in all texts.
        """
        if request.scores_prompt:
            raise no_prompt_logprobs("echo")
        config = self._model.config
        check_total_length(
            config, request.prompt, request.max_new_tokens, config.max_unscaled_context
        )

    def add(self, request: Request) -> list[Continuation]:
        """Start a request; returns its continuations."""
        result = [Continuation(request, number) for number in range(request.samples)]
        self._waiting.extend(result)
        return result

    def end(self, generation: Continuation) -> None:
        """Let a continuation end here, whatever is still to come of it."""
        generation.finish_reason = generation.finish_reason or "stop"
        if generation in self._waiting:
            self._waiting.remove(generation)
        elif generation in self._running and self._cached is not None:
            self._cached.end(self._running.index(generation))

    def step(self) -> list[Continuation]:
        """Return a chunk of each sequence; those that have new tokens or have ended.

        Raises:
            NonFiniteError: if the model's logits are NaN or Inf.
        """
        if self._cached is None or not self._cached.running:
            self._running = [
                self._waiting.popleft() for _ in range(min(self.slots, len(self._waiting)))
            ]
            if not self._running:
                return []
            self._cached = start_cached_batch(self._model, self._running, self._rows)
        drawn = self._cached.grow()
        news = [one for one in self._running if one.finish_reason is None]
        for row, one in enumerate(self._running):
            if one in news:
                self._take(one, jax.tree.map(lambda array, row=row: array[:, row], drawn))
        return news

    def _take(self, continuation: Continuation, drawn: Drawn) -> None:
        """Add the tokens drawn for a sequence, up to its end; of tokens that end it alone the
        device knows nothing.
        """
        for index, token in enumerate(drawn.tokens.tolist()):
            if token != NO_TOKEN and continuation.finish_reason is None:
                continuation.append(
                    token, _logprobs(continuation, drawn, index), self._model.config.eos_token_ids
                )
        if continuation.finish_reason is not None:
            self.end(continuation)


def _logprobs(continuation: Continuation, drawn: Drawn, index: int) -> TokenLogprobs | None:
    """Of one of the tokens that were drawn for a sequence, if requested."""
    count = continuation.request.logprobs
    if count is None:
        return None
    here = slice(index, index + 1)
    found = drawn.logprobs[here], drawn.top_logprobs[here, :count], drawn.top[here, :count]
    return TokenLogprobs(*map(torch.tensor, found))


def start_cached_batch(model: XlaModel, texts: Sequence[Continuation], rows: int) -> CachedBatch:
    """Begin texts, one in each of the first rows; what is compiled for their buckets serves
    other texts.
    """
    idle = rows - len(texts)
    lengths = np.array([*(len(text.request.prompt) for text in texts), *[1] * idle])
    # Beyond `max_unscaled_context`, some rotary scalings change.
    padded = min(bucket(int(lengths.max())), model.config.max_unscaled_context)
    tokens = np.zeros((rows, padded), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text.request.prompt)] = text.request.prompt
    counts = np.array([*(text.request.max_new_tokens for text in texts), *[0] * idle])
    params = [*(text.sampling for text in texts), *[SamplingParams()] * idle]
    penalized = any(param.needs_seen_tokens for param in params)
    counted = any(param.needs_counts for param in params)
    sampling = None
    if not all(param.likeliest_only for param in params):
        sampling = Sampling.of(params, _draw_shared_seeds(params), model.config.vocab_size)
    requested = [text.request.logprobs for text in texts if text.request.logprobs is not None]
    return CachedBatch(
        model,
        tokens,
        lengths,
        counts,
        bucket(max(padded, int((lengths + counts).max()))),
        sampling=sampling,
        penalized=penalized,
        counted=counted,
        logprobs=min(max(requested), model.config.vocab_size) if requested else None,
    )


def bucket(length: int) -> int:
    """Return a length that many share, so that what is compiled for one serves all: no shorter, at
    most twice as long.
    """
    if length <= _STEP:
        return power_of_two(length, _MIN)
    return -(-length // _STEP) * _STEP


def _draw_shared_seeds(params: Sequence[SamplingParams]) -> list[int]:
    """Return a seed in 64 bits for each sequence, the same for the processes of all hosts."""
    seeds = []
    for param in params:
        seeds.append(secrets.randbits(64) if param.seed is None else param.seed % 2**64)
    words = np.array([divmod(seed, 2**32) for seed in seeds], np.uint32)
    shared_seeds: list[int] = []
    for high, low in multihost_utils.broadcast_one_to_all(words).tolist():
        shared_seeds.append(high << 32 | low)
    return shared_seeds
