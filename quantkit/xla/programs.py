"""The two compiled programs of generation: a prompt, and a chunk of new tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from quantkit.model.decoder import Decoder
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.xla.bridge import apply, run
from quantkit.xla.model import ShardedCache
from quantkit.xla.split import DeviceSplit
from quantkit.xla.weights import SHARDED

CHUNK = 10
"""Tokens that are drawn before the host looks at them."""

_LEAST_TEMPERATURE = 1e-6
_REPLICATED = PartitionSpec()

Cache = tuple[list[jax.Array], list[jax.Array]]
"""Keys and values by layer, each [N, B, K / N, S, Dh]."""


class Sampling(NamedTuple):
    """How a chunk's tokens are drawn, as arrays.

    Attributes:
        key: [2] uint32, of the text.
        chunk: the chunk's number in it.
    """

    key: Any
    chunk: Any
    temperature: Any
    top_p: Any

    @classmethod
    def of(cls, seed: int, chunk: int, params: SamplingParams) -> Sampling:
        """
        Args:
            seed: in 64 bits.
        """
        key = np.array(divmod(seed, 1 << 32), np.uint32)
        return cls(key, np.int32(chunk), np.float32(params.temperature), np.float32(params.top_p))


def prefill_program(model: Decoder, mesh: Mesh) -> Any:
    """Compiles for each bucket: (state, cache, tokens [B, T], length) to the filled cache and logits [B, V].

    The prompt is the first `length` of the tokens. The rest is padding: it comes after, so no token of the
    prompt sees it, and what it leaves in the cache is overwritten before a token that would.
    """

    def prefill(state: Any, cache: Cache, tokens: jax.Array, length: jax.Array) -> tuple[Cache, jax.Array]:
        positions = jnp.arange(tokens.shape[1])
        return _run_shard(model, state, cache, tokens, positions, length - 1, first=True)

    return _spmd(prefill, mesh, (SHARDED, SHARDED, _REPLICATED, _REPLICATED), (SHARDED, _REPLICATED), donated=(1,))


def chunk_program(model: Decoder, mesh: Mesh, *, greedy: bool) -> Any:
    """(state, cache, logits [B, V], position, sampling) to cache, logits, tokens [CHUNK, B] and whether the
    logits that each was drawn from were finite, [CHUNK].

    The first token is drawn from the logits given; position is where it goes. `CHUNK` positions must be left.
    """

    def chunk(
        state: Any, cache: Cache, logits: jax.Array, position: jax.Array, sampling: Sampling
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        def step(carry: tuple[Cache, jax.Array], index: jax.Array) -> tuple[Any, Any]:
            cache, logits = carry
            tokens = logits.argmax(-1) if greedy else _sample(logits, sampling, index)
            positions = (position + index)[None]
            following = _run_shard(
                model, state, cache, tokens[:, None], positions, jnp.zeros((), jnp.int32), first=False
            )
            return following, (tokens, jnp.isfinite(logits).all())

        (cache, logits), (tokens, finite) = lax.scan(step, (cache, logits), jnp.arange(CHUNK))
        return cache, logits, tokens, finite

    inputs = (SHARDED, SHARDED, _REPLICATED, _REPLICATED, _REPLICATED)
    return _spmd(chunk, mesh, inputs, (SHARDED, _REPLICATED, _REPLICATED, _REPLICATED), donated=(1, 2))


def cache_shape(split: DeviceSplit, batch: int, capacity: int) -> tuple[int, ...]:
    """Of a layer's keys or values over all devices, [N, B, K / N, S, Dh]."""
    return split.devices, batch, split.local.num_kv_heads, capacity, split.config.head_dim


def sample(logits: jax.Array, key: jax.Array, temperature: jax.Array, top_p: jax.Array) -> jax.Array:
    """A token for each row: [B, V] to [B], from the likeliest with `top_p` of the probability together.

    It is what `quantkit.runtime.sampling` does, with other random numbers.
    """
    wide = logits.astype(jnp.float32)
    scaled = (wide - wide.max(-1, keepdims=True)) / jnp.maximum(temperature, _LEAST_TEMPERATURE)
    ranked, order = jax.lax.top_k(scaled, scaled.shape[-1])
    probabilities = jax.nn.softmax(ranked, axis=-1)
    outside = (probabilities.cumsum(-1) - probabilities >= top_p) & (top_p < 1)
    rank = jax.random.categorical(key, jnp.where(outside, -jnp.inf, ranked), axis=-1)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]


def _sample(logits: jax.Array, sampling: Sampling, index: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(sampling.key, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sampling.chunk), index)
    return sample(logits, key, sampling.temperature, sampling.top_p)


def _run_shard(
    model: Decoder, state: Any, cache: Cache, tokens: jax.Array, positions: jax.Array, last: jax.Array, *, first: bool
) -> tuple[Cache, jax.Array]:
    """One device's run of the decoder: the cache as it then is, and the logits [B, V] of the token at `last`."""

    def decode(tokens: Any, positions: Any, last: Any, keys: Any, values: Any) -> Any:
        cache = ShardedCache(keys, values)
        hidden = model.hidden(tokens, positions, cache, first=first)
        chosen = apply(partial(lax.dynamic_index_in_dim, axis=1, keepdims=False), hidden, last)
        return (cache.keys, cache.values), model.head(chosen)

    result: tuple[Cache, jax.Array] = run(model, state, decode, tokens, positions, last, *cache)
    return result


def _spmd(
    program: Callable[..., Any], mesh: Mesh, inputs: tuple[Any, ...], outputs: tuple[Any, ...], donated: tuple[int, ...]
) -> Any:
    """A program that every device runs; sharded arguments reach it as the device's own shard."""

    @wraps(program)
    def one(*arguments: Any) -> Any:
        results = program(*_map_sharded(lambda array: array[0], arguments, inputs))
        return _map_sharded(lambda array: array[None], results, outputs)

    mapped = jax.shard_map(one, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donated)


def _map_sharded(change: Callable[[Any], Any], values: tuple[Any, ...], specs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Change the arrays that are sharded."""
    return tuple(
        jax.tree.map(change, value) if spec == SHARDED else value for value, spec in zip(values, specs, strict=True)
    )
