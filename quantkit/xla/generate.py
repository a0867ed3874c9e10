"""The token loop over devices: a prompt padded to a bucket, then chunks until an end token."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import numpy as np
from jax.experimental import multihost_utils

from quantkit.runtime.engine import bucket as power_of_two
from quantkit.runtime.request import checked_length
from quantkit.runtime.sampling import SamplingParams
from quantkit.tensors.finite import nonfinite_logits
from quantkit.xla.engine import Text, XlaModel
from quantkit.xla.programs import CHUNK, Sampling

_LEAST, _STEP = 32, 512  # buckets are powers of two from the one to the other, then multiples of it


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
    text = Text(model, prompt, len(ids), bucket(max(padded, len(ids) + chunks * CHUNK)))
    seed = _agreed(params.seed) if params.temperature else 0
    for done in range(chunks):
        sampling = Sampling.of(seed, done, params) if params.temperature else None
        tokens, finite = text.grow(sampling)
        for token, fine in zip(tokens[: count - done * CHUNK, 0].tolist(), finite.tolist(), strict=False):
            if not fine:
                raise nonfinite_logits()
            if token in model.config.eos_token_ids:
                return
            yield token


def _agreed(seed: int | None) -> int:
    """A seed in 64 bits, the same for the processes of all hosts."""
    words = np.array(divmod((secrets.randbits(64) if seed is None else seed) % 2**64, 2**32), np.uint32)
    high, low = multihost_utils.broadcast_one_to_all(words).tolist()
    return int(high) << 32 | int(low)
