"""The two compiled programs of generation: a prompt, and a chunk of new tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from quantkit.model.decoder import Decoder
from quantkit.parallel.xla.bridge import apply, run
from quantkit.parallel.xla.draw import drawn
from quantkit.parallel.xla.model import ShardedCache
from quantkit.parallel.xla.weights import DIVIDED

CHUNK = 10
"""Tokens that are drawn before the host looks at them."""

_WHOLE = PartitionSpec()

Cache = tuple[list[jax.Array], list[jax.Array]]
"""Keys and values by layer, each [N, B, K / N, S, Dh]."""


class Sampling(NamedTuple):
    """How tokens are drawn, as arrays: the key of this chunk, temperature and top-p."""

    key: jax.Array
    temperature: jax.Array
    top_p: jax.Array


def prefill_program(model: Decoder, mesh: Mesh) -> Any:
    """Compiles for each bucket: (state, cache, tokens [B, T], length) to the filled cache and logits [B, V].

    The prompt is the first `length` of the tokens. The rest is padding: it comes after, so no token of the
    prompt sees it, and what it leaves in the cache is overwritten before a token that would.
    """

    def program(state: Any, cache: Cache, tokens: jax.Array, length: jax.Array) -> tuple[Cache, jax.Array]:
        positions = jnp.arange(tokens.shape[1])
        return _on_one(model, state, cache, tokens, positions, length - 1, first=True)

    return _everywhere(program, mesh, (DIVIDED, DIVIDED, _WHOLE, _WHOLE), (DIVIDED, _WHOLE), donated=(1,))


def chunk_program(model: Decoder, mesh: Mesh, *, greedy: bool) -> Any:
    """(state, cache, logits [B, V], position, sampling) to cache, logits, tokens [CHUNK, B] and whether the
    logits that each was drawn from were finite, [CHUNK].

    The first token is drawn from the logits given; position is where it goes. `CHUNK` positions must be left.
    """

    def program(
        state: Any, cache: Cache, logits: jax.Array, position: jax.Array, sampling: Sampling
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        def step(carry: tuple[Cache, jax.Array], index: jax.Array) -> tuple[Any, Any]:
            cache, logits = carry
            key = jax.random.fold_in(sampling.key, index)
            tokens = logits.argmax(-1) if greedy else drawn(logits, key, sampling.temperature, sampling.top_p)
            positions = (position + index)[None]
            following = _on_one(model, state, cache, tokens[:, None], positions, jnp.zeros((), jnp.int32), first=False)
            return following, (tokens, jnp.isfinite(logits).all())

        (cache, logits), (tokens, finite) = lax.scan(step, (cache, logits), jnp.arange(CHUNK))
        return cache, logits, tokens, finite

    inputs = (DIVIDED, DIVIDED, _WHOLE, _WHOLE, _WHOLE)
    return _everywhere(program, mesh, inputs, (DIVIDED, _WHOLE, _WHOLE, _WHOLE), donated=(1, 2))


def _on_one(
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


def _everywhere(
    program: Callable[..., Any], mesh: Mesh, inputs: tuple[Any, ...], outputs: tuple[Any, ...], donated: tuple[int, ...]
) -> Any:
    """Run a program on every device; divided arguments reach it as the device's own part."""

    def one(*arguments: Any) -> Any:
        own = [jax.tree.map(lambda a: a[0], x) if spec == DIVIDED else x for x, spec in zip(arguments, inputs, strict=True)]
        results = program(*own)
        return tuple(
            jax.tree.map(lambda a: a[None], x) if spec == DIVIDED else x for x, spec in zip(results, outputs, strict=True)
        )

    mapped = jax.shard_map(one, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donated)
