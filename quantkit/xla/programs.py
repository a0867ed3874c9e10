"""The two compiled programs of generation: the prompts of a batch, and a chunk of new tokens for
each.

B rows of a batch, each with its own sequence or none; V vocabulary.
`quantkit.runtime.sampling_params` declares how tokens are drawn; the random numbers differ from
torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quantkit.model.decoder import Decoder
from quantkit.runtime.sampling_params import OPTIONS, SamplingParams
from quantkit.xla.bridge import apply, run
from quantkit.xla.model import ShardedCache
from quantkit.xla.split import DeviceSplit
from quantkit.xla.weights import SHARDED

CHUNK = 10
"""Tokens of each sequence that are drawn before the host looks at them."""

NO_TOKEN = -1
"""Where a sequence had ended."""

_MIN_TEMPERATURE = 1e-6
_MAX_NUMBER = 1e30  # of float32
_MAX_COUNT = 2**31 - 1

_REPLICATED = PartitionSpec()

Cache = tuple[list[jax.Array], list[jax.Array]]
"""Keys and values by layer, each [N, B, K / N, S, Dh]."""


class Rows(NamedTuple):
    """The texts of a batch between chunks, as arrays.

    Attributes:
        positions: [B], where each sequence's next token goes.
        tokens_left: [B], tokens that may still be drawn for each; 0 where a sequence has ended, or
            a row has none.
        seen_mask: bool [B, V], which tokens each sequence holds already; None where none is
            penalized for that.
        counts: int32 [B, V], how often each token is among a sequence's new ones; None where that
            matters to none.
    """

    positions: Any
    tokens_left: Any
    seen_mask: Any = None
    counts: Any = None


class Drawn(NamedTuple):
    """A chunk's new tokens, as arrays.

    Attributes:
        tokens: [CHUNK, B]; `NO_TOKEN` where a sequence had ended.
        finite: [CHUNK, B], whether the logits that each was drawn from were.
        logprobs: float32 [CHUNK, B], log-probability of each, as the model has it; None if not
            requested.
        top, top_logprobs: [CHUNK, B, K], the likeliest tokens and theirs.
    """

    tokens: Any
    finite: Any
    logprobs: Any = None
    top: Any = None
    top_logprobs: Any = None


class Sampling(NamedTuple):
    """How the tokens of each sequence are drawn, as arrays.

    Attributes:
        keys: [B, 2] uint32, for the random numbers of each sequence.
        values: of the options by name: [B] float32 or int32, or [B, V] where an option has a value
            for each token and a sequence uses it.
    """

    keys: Any
    values: dict[str, Any]

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], vocab_size: int
    ) -> Sampling:
        """Return the arrays for sequences with these options, and seeds of 64 bits."""
        values: dict[str, Any] = {}
        for option in OPTIONS:
            found = [getattr(param, option.name) for param in params]
            if option.row is not None:
                if any(option in param.active for param in params):
                    values[option.name] = np.array(
                        [option.row(one, vocab_size) for one in found], np.float32
                    )
            elif option.type is int and option.name != "seed":
                values[option.name] = np.array([min(one, _MAX_COUNT) for one in found], np.int32)
            elif option.type is float:
                values[option.name] = np.array([min(one, _MAX_NUMBER) for one in found], np.float32)
        return cls(np.array([divmod(seed, 1 << 32) for seed in seeds], np.uint32), values)


def prefill_program(model: Decoder, mesh: Mesh) -> Any:
    """Compiles for each bucket: (state, cache, tokens [B, T], lengths [B]) to the filled cache and
    logits [B, V].

    A prompt is the first tokens of a row, as many as its length. The rest is padding: it comes
    after, so no token of the prompt sees it, and what it leaves in the cache is overwritten before
    a token that would.
    """

    def prefill(
        state: Any, cache: Cache, tokens: jax.Array, lengths: jax.Array
    ) -> tuple[Cache, jax.Array]:
        return _run_shard(
            model, state, cache, tokens, jnp.arange(tokens.shape[1]), lengths - 1, first=True
        )

    return _spmd(prefill, mesh, inputs=4, outputs=2, donated=(1,))


def chunk_program(model: Decoder, mesh: Mesh, logprobs: int | None = None) -> Any:
    """(state, cache, logits [B, V], rows, ends [E], sampling) to cache, logits, rows, what was
    drawn, and in how many steps: `CHUNK`, or fewer if all texts have ended.

    The first tokens are drawn from the given logits. A sequence ends with one of the tokens `ends`,
    or at its number of tokens; the cache must have positions for what is left. Sampling is as for
    `sample`.

    Args:
        logprobs: return log-probabilities, also of this many of the likeliest tokens.
    """

    def chunk(
        state: Any,
        cache: Cache,
        logits: jax.Array,
        rows: Rows,
        ends: jax.Array,
        sampling: Sampling | None,
    ) -> tuple[Cache, jax.Array, Rows, Drawn, jax.Array]:
        def going(carry: tuple[Any, ...]) -> jax.Array:
            index, _, _, rows, _ = carry
            return (index < CHUNK) & (rows.tokens_left > 0).any()

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            index, cache, logits, rows, drawn = carry
            new, rows, tokens = _next(logits, rows, ends, sampling, logprobs)
            drawn = jax.tree.map(lambda all_, one: all_.at[index].set(one), drawn, new)
            last = jnp.zeros_like(tokens)
            cache, logits = _run_shard(
                model, state, cache, tokens[:, None], rows.positions[:, None], last, first=False
            )
            return (
                index + 1,
                cache,
                logits,
                rows._replace(positions=rows.positions + (rows.tokens_left > 0)),
                drawn,
            )

        shapes = jax.eval_shape(lambda: _next(logits, rows, ends, sampling, logprobs)[0])
        drawn = jax.tree.map(lambda one: jnp.zeros((CHUNK, *one.shape), one.dtype), shapes)
        steps, cache, logits, rows, drawn = lax.while_loop(
            going, step, (jnp.int32(0), cache, logits, rows, drawn)
        )
        return cache, logits, rows, drawn, steps

    return _spmd(chunk, mesh, inputs=6, outputs=5, donated=(1, 2))


def cache_shape(split: DeviceSplit, batch: int, capacity: int) -> tuple[int, ...]:
    """Of a layer's keys or values over all devices, [N, B, K / N, S, Dh]."""
    return split.devices, batch, split.local.num_kv_heads, capacity, split.config.head_dim


def _next(
    logits: jax.Array, rows: Rows, ends: jax.Array, sampling: Sampling | None, logprobs: int | None
) -> tuple[Drawn, Rows, jax.Array]:
    """Draw a token for each sequence: what was drawn, the rows with these tokens in place, and the
    tokens [B].

    A sequence that has ended, or a row that has none, draws too, since all rows are computed; its
    tokens are dropped.
    """
    active = rows.tokens_left > 0
    tokens = sample(logits, sampling, rows.positions, rows.seen_mask, rows.counts)
    drawn = Drawn(jnp.where(active, tokens, NO_TOKEN), jnp.isfinite(logits).all(-1) | ~active)
    if logprobs is not None:
        all_ = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        chosen = jnp.take_along_axis(all_, tokens[:, None], axis=-1)[:, 0]
        likeliest, top = lax.top_k(all_, logprobs)
        drawn = drawn._replace(logprobs=chosen, top=top, top_logprobs=likeliest)
    ended = (tokens[:, None] == ends).any(-1)
    seen = rows.seen_mask
    counts = rows.counts
    places = (jnp.arange(len(tokens)), tokens)
    if seen is not None:
        seen = seen.at[places].set(True)
    if counts is not None:
        counts = counts.at[places].add(1)
    return (
        drawn,
        Rows(rows.positions, jnp.where(active & ~ended, rows.tokens_left - 1, 0), seen, counts),
        tokens,
    )


def sample(
    logits: jax.Array,
    sampling: Sampling | None,
    positions: jax.Array,
    seen_mask: jax.Array | None,
    counts: jax.Array | None = None,
) -> jax.Array:
    """Return a token for each sequence, [B, V] to [B].

    Args:
        sampling: None takes the likeliest.
        positions: where the tokens go, [B]. What is drawn for a sequence depends on its key and on
            its position alone.
        seen: which tokens each sequence already contains, bool [B, V]; None if no option needs it.
        counts: how often each token is among its new ones, [B, V]; None if no option needs it.
    """
    if sampling is None:
        return logits.argmax(-1)
    past = {"seen": seen_mask, "counts": counts}
    return jax.vmap(_sample_one)(
        logits.astype(jnp.float32), sampling.keys, positions, sampling.values, past
    )


def _sample_one(
    logits: jax.Array,
    key: jax.Array,
    position: jax.Array,
    values: dict[str, jax.Array],
    past: dict[str, jax.Array | None],
) -> jax.Array:
    """Return a token of one sequence, from logits [V]; `past` is as `Option` describes it."""
    for option in OPTIONS:
        if option.adjust is not None and option.name in values:
            if option.past is None:
                needed = None
            else:
                needed = past[option.past]
            if option.past is None or needed is not None:
                logits = option.adjust(jnp, logits, values[option.name], needed)
    temperature = values["temperature"]
    scaled = (logits - logits.max()) / jnp.maximum(temperature, _MIN_TEMPERATURE)
    ranked, order = jax.lax.top_k(scaled, scaled.shape[0])
    for option in OPTIONS:
        if option.drops is not None:
            drops = partial(option.drops, jnp, jax.nn.softmax(ranked), jnp.arange(ranked.shape[0]))
            ranked = jnp.where(drops(values[option.name]), -jnp.inf, ranked)
    key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
    drawn = order[jax.random.categorical(key, ranked)]
    return jnp.where(temperature > 0, drawn, logits.argmax(-1))


def _run_shard(
    model: Decoder,
    state: Any,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    last: jax.Array,
    *,
    first: bool,
) -> tuple[Cache, jax.Array]:
    """Return one device's run of the decoder: the cache as it then is, and the logits [B, V] of
    each row's token at `last`, [B].
    """

    def decode(tokens: Any, positions: Any, last: Any, keys: Any, values: Any) -> Any:
        cache = ShardedCache(keys, values)
        hidden = model.hidden(tokens, positions, cache, first=first)
        stored = tuple([layer.rows for layer in layers] for layers in (cache.keys, cache.values))
        chosen = apply(
            lambda of, at: jnp.take_along_axis(of, at[:, None, None], axis=1)[:, 0], hidden, last
        )
        return stored, model.head(chosen)

    result: tuple[Cache, jax.Array] = run(model, state, decode, tokens, positions, last, *cache)
    return result


def _spmd(
    program: Callable[..., Any], mesh: Mesh, *, inputs: int, outputs: int, donated: tuple[int, ...]
) -> Any:
    """Return a program that every device runs: the first two inputs, state and cache, reach it as
    the device's own shards, and its first output is the cache again. All other inputs and outputs
    are replicated.
    """

    @wraps(program)
    def run_on_device(state: Any, cache: Any, *arguments: Any) -> Any:
        own = jax.tree.map(lambda array: array[0], (state, cache))
        cache, *results = program(*own, *arguments)
        return jax.tree.map(lambda array: array[None], cache), *results

    before = (SHARDED, SHARDED, *[_REPLICATED] * (inputs - 2))
    after = (SHARDED, *[_REPLICATED] * (outputs - 1))
    mapped = jax.shard_map(
        run_on_device, mesh=mesh, in_specs=before, out_specs=after, check_vma=False
    )
    # Both the host's arrays and the devices'.
    shardings = tuple(NamedSharding(mesh, spec) for spec in before)
    return jax.jit(mapped, in_shardings=shardings, donate_argnums=donated)
