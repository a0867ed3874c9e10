"""Generation over devices: a prompt padded to a bucket, then chunks of tokens until an end token."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from quantkit.errors import RequestError
from quantkit.runtime.engine import bucket as power_of_two
from quantkit.runtime.request import checked_length
from quantkit.runtime.sampling import SamplingParams
from quantkit.tensors.finite import nonfinite_logits
from quantkit.xla.engine import XlaModel
from quantkit.xla.programs import CHUNK, Sampling, cache_shape
from quantkit.xla.weights import float_dtype, zeros

_LEAST, _STEP = 32, 512  # buckets are powers of two from the one to the other, then multiples of it
_UNUSED = Sampling.of(0, 0, SamplingParams())


def generate(
    model: XlaModel,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Iterator[int]:
    """What `quantkit.generate` does. The same seed draws other tokens than there.

    Raises:
        RequestError, NonFiniteError: as there.
    """
    params = SamplingParams(temperature, top_p, seed)
    length = checked_length(model.config, ids, max_new_tokens)
    return _tokens(model, list(ids), length - len(ids), params)


def bucket(length: int) -> int:
    """A length that many share, so that what is compiled for one serves all: no shorter, at most twice as long."""
    return power_of_two(length, _LEAST) if length <= _STEP else -(-length // _STEP) * _STEP


def _tokens(model: XlaModel, ids: list[int], count: int, params: SamplingParams) -> Iterator[int]:
    padded = min(bucket(len(ids)), model.config.max_context)  # beyond it, some rotary scalings change
    prompt = np.zeros((1, padded), np.int32)
    prompt[0, : len(ids)] = ids
    chunks = -(-count // CHUNK)
    text = CachedText(model, prompt, len(ids), bucket(max(padded, len(ids) + chunks * CHUNK)))
    seed = _shared_seed(params.seed) if params.temperature else 0
    for done in range(chunks):
        sampling = Sampling.of(seed, done, params) if params.temperature else None
        tokens, finite = text.grow(sampling)
        for token, fine in zip(tokens[: count - done * CHUNK, 0].tolist(), finite.tolist(), strict=False):
            if not fine:
                raise nonfinite_logits()
            if token in model.config.eos_token_ids:
                return
            yield token


def _shared_seed(seed: int | None) -> int:
    """A seed in 64 bits, the same for the processes of all hosts."""
    words = np.array(divmod((secrets.randbits(64) if seed is None else seed) % 2**64, 2**32), np.uint32)
    high, low = multihost_utils.broadcast_one_to_all(words).tolist()
    return int(high) << 32 | int(low)


class CachedText:
    """A text in the cache of a model; it grows by chunks."""

    def __init__(self, model: XlaModel, tokens: np.ndarray[Any, Any], length: int, capacity: int) -> None:
        """Run the prompt.

        Args:
            tokens: [B, T], of which the first `length` are the prompt and the others padding.
            capacity: positions that the cache has.

        Raises:
            RequestError: if the tokens are more than that.
        """
        if tokens.shape[1] > capacity:
            raise RequestError("the prompt exceeds the cache", found=tokens.shape[1], expected=f"at most {capacity}")
        self.position = length
        self.capacity = capacity
        self._model = model
        shape = cache_shape(model.split, tokens.shape[0], capacity)
        layers = range(model.config.num_layers)
        cache = tuple([zeros(model.mesh, shape, float_dtype(model.dtype)) for _ in layers] for _ in range(2))
        self._cache, self.logits = model.prefill(model.state, cache, tokens.astype(np.int32), np.int32(length))

    def grow(self, sampling: Sampling | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Draw `CHUNK` tokens: [CHUNK, B], and whether the logits of each were finite, [CHUNK].

        Args:
            sampling: how; None takes the likeliest.

        Raises:
            RequestError: if the cache has no room for them. Beyond its end XLA would write over its last
                positions, without a word.
        """
        if self.position + CHUNK > self.capacity:
            raise RequestError(
                "the cache is full", found=f"{self.position} of {self.capacity} positions", expected=f"room for {CHUNK}"
            )
        program = self._model.greedy_chunk if sampling is None else self._model.sampled_chunk
        self._cache, self.logits, tokens, finite = program(
            self._model.state, self._cache, self.logits, np.int32(self.position), sampling or _UNUSED
        )
        self.position += CHUNK
        return np.asarray(tokens), np.asarray(finite)
