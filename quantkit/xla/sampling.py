"""From logits to the next token of each sequence, in JAX; `quantkit.runtime.sampling_params` declares the options.

The random numbers differ from torch's. B texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quantkit.runtime.sampling_params import OPTIONS, SamplingParams

_MIN_TEMPERATURE = 1e-6
_MAX_NUMBER = 1e30  # of float32
_MAX_COUNT = 2**31 - 1


class Sampling(NamedTuple):
    """How the tokens of each sequence are drawn, as arrays.

    Attributes:
        keys: [B, 2] uint32, for the random numbers of each sequence.
        values: of the options by name: [B] float32 or int32, or [B, V] where an option has a value for each token and
            a sequence uses it.
    """

    keys: Any
    values: dict[str, Any]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], vocab_size: int) -> Sampling:
        """
        Args:
            seeds: 64 bits for each sequence.
        """
        values: dict[str, Any] = {}
        for option in OPTIONS:
            found = [getattr(one, option.name) for one in params]
            if option.row is not None:
                if any(option in one.active for one in params):
                    values[option.name] = np.array([option.row(one, vocab_size) for one in found], np.float32)
            elif option.type is int and option.name != "seed":
                values[option.name] = np.array([min(one, _MAX_COUNT) for one in found], np.int32)
            elif option.type is float:
                values[option.name] = np.array([min(one, _MAX_NUMBER) for one in found], np.float32)
        return cls(np.array([divmod(seed, 1 << 32) for seed in seeds], np.uint32), values)


def sample(logits: jax.Array, sampling: Sampling | None, positions: jax.Array, seen: jax.Array | None) -> jax.Array:
    """A token for each sequence, [B, V] to [B].

    Args:
        sampling: None takes the likeliest.
        positions: where the tokens go, [B]. What is drawn for a sequence depends on its key and on its position alone.
        seen: which tokens each sequence already contains, bool [B, V]; None if no option needs it.
    """
    if sampling is None:
        return logits.argmax(-1)
    return jax.vmap(_sample_one)(logits.astype(jnp.float32), sampling.keys, positions, sampling.values, seen)


def _sample_one(
    logits: jax.Array, key: jax.Array, position: jax.Array, values: dict[str, jax.Array], seen: jax.Array | None
) -> jax.Array:
    """A token of one sequence, from logits [V]."""
    for option in OPTIONS:
        if option.adjust is not None and option.name in values and not (option.needs_seen_tokens and seen is None):
            logits = option.adjust(jnp, logits, values[option.name], seen)
    temperature = values["temperature"]
    scaled = (logits - logits.max()) / jnp.maximum(temperature, _MIN_TEMPERATURE)
    ranked, order = jax.lax.top_k(scaled, scaled.shape[0])
    for option in OPTIONS:
        if option.drops is not None:
            drops = partial(option.drops, jax.nn.softmax(ranked), jnp.arange(ranked.shape[0]))
            ranked = jnp.where(drops(values[option.name]), -jnp.inf, ranked)
    key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
    drawn = order[jax.random.categorical(key, ranked)]
    return jnp.where(temperature > 0, drawn, logits.argmax(-1))
