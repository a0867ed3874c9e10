"""Compile the two programs of generation: one for the prompts of a batch, one for a chunk of new
tokens of each sequence.

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
"""Tokens of each sequence that the device draws before the host reads them."""

NO_TOKEN = -1
"""Replaces tokens after the end of a sequence."""

# Avoids a division by zero: the likeliest token is selected separately at temperature 0.
_MIN_TEMPERATURE = 1e-6
# Larger options are clipped to these, so that they fit float32 and int32.
_MAX_NUMBER = 1e30
_MAX_COUNT = 2**31 - 1

_REPLICATED = PartitionSpec()

Cache = tuple[list[jax.Array], list[jax.Array]]
"""Keys and values by layer, each [N, B, K / N, S, Dh]."""


class Rows(NamedTuple):
    """The texts of a batch between chunks, as arrays.

    Attributes:
        positions: [B], of each sequence's next token.
        tokens_left: [B], how many tokens may still be drawn for each sequence; 0 if it has ended,
            or the row has no sequence.
        seen_mask: bool [B, V], which tokens each sequence already contains; None if no option
            needs it.
        counts: int32 [B, V], how often each token is among a sequence's new tokens; None if no
            option needs it.
    """

    positions: Any
    tokens_left: Any
    seen_mask: Any = None
    counts: Any = None


class Drawn(NamedTuple):
    """A chunk's new tokens, as arrays.

    Attributes:
        tokens: [CHUNK, B]; `NO_TOKEN` after the end of a sequence.
        finite: [CHUNK, B], whether the logits that each token was drawn from were finite.
        logprobs: float32 [CHUNK, B], log-probability of each token, before the sampling options;
            None if not requested.
        top, top_logprobs: [CHUNK, B, K], the likeliest tokens and their log-probabilities.
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
        """Convert the options of sequences, and their seeds of 64 bits, to arrays."""
        values: dict[str, Any] = {}
        for option in OPTIONS:
            settings = [getattr(param, option.name) for param in params]
            if option.row is not None:
                # A row of the vocabulary for each sequence is large, so it exists only if used.
                if any(option in param.active for param in params):
                    rows = [option.row(setting, vocab_size) for setting in settings]
                    values[option.name] = np.array(rows, np.float32)
            elif option.type is int and option.name != "seed":
                counts = [min(setting, _MAX_COUNT) for setting in settings]
                values[option.name] = np.array(counts, np.int32)
            elif option.type is float:
                numbers = [min(setting, _MAX_NUMBER) for setting in settings]
                values[option.name] = np.array(numbers, np.float32)
        # Two words of 32 bits are a key of threefry.
        return cls(np.array([divmod(seed, 1 << 32) for seed in seeds], np.uint32), values)


def prefill_program(model: Decoder, mesh: Mesh) -> Any:
    """Make the prefill program, compiled for each bucket: (state, cache, tokens [B, T], lengths
    [B]) to the filled cache and logits [B, V].

    Each row begins with a prompt of its length, followed by padding. No token of the prompt sees
    the padding, because attention is causal. The padding's keys and values are overwritten before
    a later token could see them.
    """

    def prefill(
        state: Any, cache: Cache, tokens: jax.Array, lengths: jax.Array
    ) -> tuple[Cache, jax.Array]:
        return _run_shard(
            model, state, cache, tokens, jnp.arange(tokens.shape[1]), lengths - 1, is_prefill=True
        )

    return _spmd(prefill, mesh, inputs=4, outputs=2, donated=(1,))


def chunk_program(model: Decoder, mesh: Mesh, logprobs: int | None = None) -> Any:
    """Make the decode program: (state, cache, logits [B, V], rows, ends [E], sampling) to cache,
    logits, rows, `Drawn`, and the number of steps: `CHUNK`, or fewer if all texts have ended.

    The first tokens are drawn from the input logits. A sequence ends with one of the tokens `ends`,
    or at its number of tokens; the cache must have positions for all of them. Sampling is as for
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
            drawn = jax.tree.map(lambda array, value: array.at[index].set(value), drawn, new)
            # Each row has one token, whose logits are needed.
            last = jnp.zeros_like(tokens)
            cache, logits = _run_shard(
                model,
                state,
                cache,
                tokens[:, None],
                rows.positions[:, None],
                last,
                is_prefill=False,
            )
            # A sequence that has ended writes to the same position again, so that it does not
            # exceed the cache.
            rows = rows._replace(positions=rows.positions + (rows.tokens_left > 0))
            return index + 1, cache, logits, rows, drawn

        # The loop's state must have the shapes of all steps from the start.
        shapes = jax.eval_shape(lambda: _next(logits, rows, ends, sampling, logprobs)[0])
        drawn = jax.tree.map(lambda spec: jnp.zeros((CHUNK, *spec.shape), spec.dtype), shapes)
        steps, cache, logits, rows, drawn = lax.while_loop(
            going, step, (jnp.int32(0), cache, logits, rows, drawn)
        )
        return cache, logits, rows, drawn, steps

    return _spmd(chunk, mesh, inputs=6, outputs=5, donated=(1, 2))


def cache_shape(split: DeviceSplit, batch: int, capacity: int) -> tuple[int, ...]:
    """Compute the shape of a layer's keys or values over all devices, [N, B, K / N, S, Dh]."""
    return split.devices, batch, split.local.num_kv_heads, capacity, split.config.head_dim


def _next(
    logits: jax.Array, rows: Rows, ends: jax.Array, sampling: Sampling | None, logprobs: int | None
) -> tuple[Drawn, Rows, jax.Array]:
    """Draw a token for each sequence: returns `Drawn`, the updated rows, and the tokens [B].

    Rows whose sequence has ended, or that have none, are computed as well; their tokens are
    replaced by `NO_TOKEN`.
    """
    active = rows.tokens_left > 0
    tokens = sample(logits, sampling, rows.positions, rows.seen_mask, rows.counts)
    drawn = Drawn(jnp.where(active, tokens, NO_TOKEN), jnp.isfinite(logits).all(-1) | ~active)
    if logprobs is not None:
        all_logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        chosen = jnp.take_along_axis(all_logprobs, tokens[:, None], axis=-1)[:, 0]
        likeliest, top = lax.top_k(all_logprobs, logprobs)
        drawn = drawn._replace(logprobs=chosen, top=top, top_logprobs=likeliest)
    ended = (tokens[:, None] == ends).any(-1)
    tokens_left = jnp.where(active & ~ended, rows.tokens_left - 1, 0)
    seen_mask = rows.seen_mask
    counts = rows.counts
    places = (jnp.arange(len(tokens)), tokens)
    if seen_mask is not None:
        seen_mask = seen_mask.at[places].set(True)
    if counts is not None:
        counts = counts.at[places].add(1)
    return drawn, Rows(rows.positions, tokens_left, seen_mask, counts), tokens


def sample(
    logits: jax.Array,
    sampling: Sampling | None,
    positions: jax.Array,
    seen_mask: jax.Array | None,
    counts: jax.Array | None = None,
) -> jax.Array:
    """Draw a token for each sequence, [B, V] to [B].

    Args:
        sampling: None takes the likeliest.
        positions: of the tokens, [B]. The random numbers of a sequence depend only on its key and
            on the position.
        seen_mask: tokens that each sequence already contains, bool [B, V]; None if no option needs
            them.
        counts: how often each token is among its new tokens, [B, V]; None if no option needs it.
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
    """Draw a token of one sequence from logits [V]; `Option` describes `past`."""
    for option in OPTIONS:
        if option.adjust is not None and option.name in values:
            history = None if option.past is None else past[option.past]
            # Without the history, the option is neutral in all sequences.
            if option.past is None or history is not None:
                logits = option.adjust(jnp, logits, values[option.name], history)
    temperature = values["temperature"]
    # Subtract first: at low temperatures, quotients of large logits would lose their differences.
    scaled = (logits - logits.max()) / jnp.maximum(temperature, _MIN_TEMPERATURE)
    ranked, order = jax.lax.top_k(scaled, scaled.shape[0])
    for option in OPTIONS:
        if option.drops is not None:
            drops = partial(option.drops, jnp, jax.nn.softmax(ranked), jnp.arange(ranked.shape[0]))
            ranked = jnp.where(drops(values[option.name]), -jnp.inf, ranked)
    # A key for the position, so that a token does not depend on the size of chunks.
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
    is_prefill: bool,
) -> tuple[Cache, jax.Array]:
    """Run one device's decoder: returns the new cache, and the logits [B, V] of each row's token at
    index `last`, [B].
    """

    def decode(tokens: Any, positions: Any, last: Any, keys: Any, values: Any) -> Any:
        cache = ShardedCache(keys, values)
        hidden = model.hidden(tokens, positions, cache, is_prefill=is_prefill)
        # Models with other layers than attention are refused, see `require_served`.
        rows = [cache.rows(layer) for layer in range(len(cache.layers))]
        new_keys = [layer.keys.rows for layer in rows]
        new_values = [layer.values.rows for layer in rows]
        # Only the last token of a prompt needs logits, which are the largest activations.
        last_hidden = apply(_take_rows, hidden, last)
        return (new_keys, new_values), model.head(last_hidden)

    result: tuple[Cache, jax.Array] = run(model, state, decode, tokens, positions, last, *cache)
    return result


def _take_rows(hidden: jax.Array, index: jax.Array) -> jax.Array:
    """Take one row of each sequence: [B, T, D] and [B] to [B, D]."""
    return jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]


def _spmd(
    program: Callable[..., Any], mesh: Mesh, *, inputs: int, outputs: int, donated: tuple[int, ...]
) -> Any:
    """Compile a program that every device runs. Its first two inputs, state and cache, are the
    device's own shards, and its first output is the cache. All other inputs and outputs are
    replicated.
    """

    @wraps(program)
    def run_on_device(state: Any, cache: Any, *arguments: Any) -> Any:
        # Shards are [1, ...], because all arrays have a first dimension for the devices.
        shards = jax.tree.map(lambda array: array[0], (state, cache))
        cache, *results = program(*shards, *arguments)
        return jax.tree.map(lambda array: array[None], cache), *results

    before = (SHARDED, SHARDED, *[_REPLICATED] * (inputs - 2))
    after = (SHARDED, *[_REPLICATED] * (outputs - 1))
    mapped = jax.shard_map(
        run_on_device, mesh=mesh, in_specs=before, out_specs=after, check_vma=False
    )
    # Explicit shardings, because arguments may be arrays of the host or of the devices.
    shardings = tuple(NamedSharding(mesh, spec) for spec in before)
    return jax.jit(mapped, in_shardings=shardings, donate_argnums=donated)
