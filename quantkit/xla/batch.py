"""Texts in the cache of a model, side by side.

Prompts are padded to a bucket of lengths and their number to one of sizes; then come chunks of tokens, until all
texts have ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from quantkit.errors import RequestError
from quantkit.runtime.engine import bucket as power_of_two
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.tensors.finite import nonfinite_logits
from quantkit.xla.programs import Drawn, Rows, cache_shape
from quantkit.xla.sampling import Sampling
from quantkit.xla.weights import float_dtype, zeros

if TYPE_CHECKING:
    from quantkit.xla.engine import XlaModel

_LEAST, _STEP = 32, 512  # buckets are powers of two from the one to the other, then multiples of it
_NOTHING_ASKED = SamplingParams()

Array = np.ndarray[Any, Any]


class CachedBatch:
    """Texts that begin together and grow by chunks, each until it ends.

    Attributes:
        logits: [B, V], of what follows.
        running: whether there is a text that has not ended.
    """

    def __init__(
        self, model: XlaModel, tokens: Array, lengths: Array, counts: Array, capacity: int, *,
        sampling: Sampling | None = None, penalized: bool = False, logprobs: int | None = None,
    ) -> None:  # fmt: skip
        """Run the prompts.

        Args:
            tokens: [B, T], of which the first tokens of each row, as many as its length [B], are a prompt and the
                others padding.
            counts: [B], tokens that each text gets at most; 0 where a row has none.
            capacity: positions that the cache has.
            sampling: how tokens are drawn; None takes the likeliest.
            penalized: whether tokens that a text holds already have a penalty.
            logprobs: also give log-probabilities, and so many of the likeliest tokens.

        Raises:
            RequestError: if the texts are more than that. Beyond the cache's end XLA would write over its last
                positions, without a word.
        """
        needed = max(tokens.shape[1], int((lengths + counts).max()))
        if needed > capacity:
            raise RequestError("the texts exceed the cache", found=needed, expected=f"at most {capacity} positions")
        self.running = True
        self._model = model
        self._sampling = sampling
        self._program = model.chunk(logprobs)
        self._ends = np.array(model.config.eos_token_ids, np.int32)
        self._rows = Rows(lengths.astype(np.int32), counts.astype(np.int32))
        if penalized:
            self._rows = self._rows._replace(held=_held(tokens, lengths, model.config.vocab_size))
        shape = cache_shape(model.split, tokens.shape[0], capacity)
        layers = range(model.config.num_layers)
        cache = tuple([zeros(model.mesh, shape, float_dtype(model.dtype)) for _ in layers] for _ in range(2))
        self._cache, self.logits = model.prefill(model.state, cache, tokens.astype(np.int32), lengths.astype(np.int32))

    def grow(self) -> Drawn:
        """The next tokens of all texts, [steps, B]: a chunk of them, or fewer if all texts end before.

        Raises:
            NonFiniteError: if the logits of a text are NaN or Inf.
        """
        self._cache, self.logits, self._rows, drawn, steps = self._program(
            self._model.state, self._cache, self.logits, self._rows, self._ends, self._sampling
        )
        found: Drawn = jax.tree.map(lambda array: np.asarray(array)[: int(steps)], drawn)
        if not found.finite.all():
            raise nonfinite_logits()
        self.running = bool((np.asarray(self._rows.left) > 0).any())
        return found

    def end(self, rows: Sequence[int]) -> None:
        """Let these texts get no more tokens."""
        left = np.array(self._rows.left)
        left[list(rows)] = 0
        self._rows = self._rows._replace(left=left)
        self.running = bool(left.any())


def batch_of(
    model: XlaModel, prompts: Sequence[Sequence[int]], counts: Sequence[int], params: Sequence[SamplingParams],
    *, rows: int | None = None, logprobs: int | None = None,
) -> CachedBatch:  # fmt: skip
    """Begin texts, one in each row; what is compiled for their buckets serves other texts.

    Args:
        prompts: token ids; they fit the model's context together with as many tokens as `counts` says.
        rows: that a batch has at most; None is as many as there are texts.
        logprobs: as for `CachedBatch`.
    """
    size = min(power_of_two(len(prompts), 1), rows or len(prompts))
    idle = size - len(prompts)
    lengths = np.array([*map(len, prompts), *[1] * idle])
    padded = min(bucket(int(lengths.max())), model.config.max_context)  # beyond it, some rotary scalings change
    tokens = np.zeros((size, padded), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    wanted = np.array([*counts, *[0] * idle])
    params = [*params, *[_NOTHING_ASKED] * idle]
    penalized = any(one.repetition_penalty != 1 for one in params)
    sampling = None
    if penalized or any(one.temperature or one.logit_bias for one in params):
        sampling = Sampling.of(params, _shared_seeds(params), model.config.vocab_size)
    return CachedBatch(
        model, tokens, lengths, wanted, bucket(max(padded, int((lengths + wanted).max()))),
        sampling=sampling, penalized=penalized, logprobs=logprobs,
    )  # fmt: skip


def bucket(length: int) -> int:
    """A length that many share, so that what is compiled for one serves all: no shorter, at most twice as long."""
    return power_of_two(length, _LEAST) if length <= _STEP else -(-length // _STEP) * _STEP


def _held(tokens: Array, lengths: Array, vocabulary: int) -> Array:
    """Which tokens each prompt holds, bool [B, V]."""
    held = np.zeros((len(tokens), vocabulary), bool)
    for row, length in enumerate(lengths):
        held[row, tokens[row, :length]] = True
    return held


def _shared_seeds(params: Sequence[SamplingParams]) -> list[int]:
    """A seed in 64 bits for each text, the same for the processes of all hosts."""
    seeds = [secrets.randbits(64) if one.seed is None else one.seed % 2**64 for one in params]
    words = np.array([divmod(seed, 2**32) for seed in seeds], np.uint32)
    return [high << 32 | low for high, low in multihost_utils.broadcast_one_to_all(words).tolist()]
