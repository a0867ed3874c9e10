"""From logits to the next token of each text, on a device: the rules of `quantkit.runtime.sampling`, other random
numbers.

B texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quantkit.runtime.engine import bucket
from quantkit.runtime.sampling_params import SamplingParams

_MIN_TEMPERATURE = 1e-6
_MOST_TEMPERATURE = 1e30  # of float32


class Sampling(NamedTuple):
    """How each text's tokens are drawn, as arrays.

    Attributes:
        keys: [B, 2] uint32, of each text's own random numbers.
        temperature, top_p, min_p, penalty: [B] float32.
        top_k: [B] int32.
        biased: [B, K] int32, tokens whose logits get a bias; V where there are fewer.
        bias: [B, K] float32, theirs.
    """

    keys: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any
    biased: Any
    bias: Any

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], vocabulary: int) -> Sampling:
        """
        Args:
            seeds: of the texts, in 64 bits.
        """
        count = max(len(one.logit_bias) for one in params)
        width = bucket(count, 1) if count else 0
        biased = np.full((len(params), width), vocabulary, np.int32)
        bias = np.zeros((len(params), width), np.float32)
        for row, one in enumerate(params):
            biased[row, : len(one.logit_bias)] = list(one.logit_bias)
            bias[row, : len(one.logit_bias)] = list(one.logit_bias.values())
        return cls(
            keys=np.array([divmod(seed, 1 << 32) for seed in seeds], np.uint32),
            temperature=np.array([min(one.temperature, _MOST_TEMPERATURE) for one in params], np.float32),
            top_k=np.array([min(one.top_k, vocabulary) for one in params], np.int32),
            top_p=np.array([one.top_p for one in params], np.float32),
            min_p=np.array([one.min_p for one in params], np.float32),
            penalty=np.array([one.repetition_penalty for one in params], np.float32),
            biased=biased,
            bias=bias,
        )


def sample(logits: jax.Array, sampling: Sampling | None, positions: jax.Array, held: jax.Array | None) -> jax.Array:
    """A token for each text, [B, V] to [B].

    Args:
        sampling: how; None takes the likeliest.
        positions: where the tokens go, [B]. A text's draw depends on its key and on this, and on no other text.
        held: which tokens each text holds already, bool [B, V]; None where none is penalized.
    """
    if sampling is None:
        return logits.argmax(-1)
    logits = _adjusted(logits.astype(jnp.float32), sampling, held)
    keys = jax.vmap(_key)(sampling.keys, positions)
    drawn = jax.vmap(_draw)(logits, keys, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return jnp.where(sampling.temperature > 0, drawn, logits.argmax(-1))


def _adjusted(logits: jax.Array, sampling: Sampling, held: jax.Array | None) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, sampling.biased].add(sampling.bias, mode="drop")
    if held is None:
        return logits
    penalty = sampling.penalty[:, None]
    return jnp.where(held, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _key(data: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), position)


def _draw(
    logits: jax.Array, key: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """A token of one text, from logits [V]."""
    scaled = (logits - logits.max()) / jnp.maximum(temperature, _MIN_TEMPERATURE)
    ranked, order = jax.lax.top_k(scaled, scaled.shape[0])
    ranked = jnp.where((top_k > 0) & (jnp.arange(ranked.shape[0]) >= top_k), -jnp.inf, ranked)
    found = jax.nn.softmax(ranked)
    outside = ((found.cumsum() - found > top_p) & (top_p < 1)) | (found < min_p * found[0])
    return order[jax.random.categorical(key, jnp.where(outside, -jnp.inf, ranked))]
