"""What one device computes of the model's parts, in JAX; `AXIS` is the devices'.

M rows, I inputs, O outputs, G groups of the weight's columns.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "tp"

_FEW_ROWS = 64  # up to which sums for each group take less memory than the weight as floats
_BLOCK = 512  # queries of which the weights over all positions are in memory at once
_EXACT = lax.Precision.HIGHEST  # a TPU would otherwise round float32 to bfloat16

_dot = partial(lax.dot_general, precision=_EXACT, preferred_element_type=jnp.float32)


def float_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x @ weight.T`` in float32: [M, I] and [O, I] to [M, O]."""
    return _dot(x, weight, (((1,), (1,)), ((), ())))


def quantized_product(x: jax.Array, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> jax.Array:
    """``x @ weight.T`` in float32 for ``weight = scale * (codes - zero)``, the weight never there as floats.

    Args:
        x: [M, I].
        codes: [G, O, I / G] int4 or int8.
        scale: [G, O].
        zero: [G, O], or None for zeros.
    """
    groups = codes.shape[0]
    grouped = x.reshape(x.shape[0], groups, -1)
    steps = scale.astype(jnp.float32)
    if groups > 1 and x.shape[0] > _FEW_ROWS:
        offset = 0.0 if zero is None else zero.astype(jnp.float32)[..., None]
        weight = ((codes.astype(jnp.float32) - offset) * steps[..., None]).astype(x.dtype)  # in passing
        return _dot(grouped, weight, (((1, 2), (0, 2)), ((), ())))
    sums = _dot(grouped, codes.astype(x.dtype), (((2,), (2,)), ((1,), (0,))))  # [G, M, O]
    if zero is not None:
        inputs = grouped.astype(jnp.float32).sum(-1).T  # [G, M]
        sums = sums - inputs[..., None] * zero.astype(jnp.float32)[:, None]
    return (sums * steps[:, None]).sum(0)


def vocab_parallel_embedding(tokens: jax.Array, weight: jax.Array) -> jax.Array:
    """Rows of an embedding of which each device has some of the vocabulary: [B, T] and [V / N, D] to [B, T, D]."""
    own = tokens - lax.axis_index(AXIS) * weight.shape[0]
    here = (own >= 0) & (own < weight.shape[0])
    rows = jnp.take(weight, jnp.where(here, own, 0), axis=0)
    return lax.psum(jnp.where(here[..., None], rows, 0), AXIS)


def vocab_parallel_codes(
    tokens: jax.Array, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None
) -> jax.Array:  # fmt: skip
    """`vocab_parallel_embedding` of rows that lie as codes: [B, T] to [B, T, D] in float32.

    Args:
        codes: [G, V / N, D / G] int4 or int8.
        scale: [G, V / N].
        zero: [G, V / N], or None for zeros.
    """
    own = tokens - lax.axis_index(AXIS) * codes.shape[1]
    here = (own >= 0) & (own < codes.shape[1])

    def taken(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.take(array, jnp.where(here, own, 0), axis=1), 0, 2).astype(jnp.float32)

    found = taken(codes) if zero is None else taken(codes) - taken(zero)[..., None]  # [B, T, G, D / G]
    rows = (found * taken(scale)[..., None]).reshape(*tokens.shape, -1)
    return lax.psum(jnp.where(here[..., None], rows, 0), AXIS)


def all_reduce(product: jax.Array) -> jax.Array:
    """What the devices have computed of the same outputs, added up."""
    return lax.psum(product, AXIS)


def all_gather(product: jax.Array, size: int) -> jax.Array:
    """What the devices have computed of different outputs, side by side; the first `size`."""
    return lax.all_gather(product, AXIS, axis=product.ndim - 1, tiled=True)[..., :size]


def attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None, scale: float | None = None
) -> jax.Array:  # fmt: skip
    """Grouped-query attention, its softmax in float32.

    Args:
        queries: [B, H, T, Dh].
        keys, values: [B, K, S, Dh]; each KV head serves H / K query heads.
        mask: [T, S] or [B, 1, T, S], true where a query sees a position; None for each up to its own.
        scale: what products are multiplied by; None is one over the root of Dh.
    """
    length, span = queries.shape[2], keys.shape[2]
    scale = queries.shape[3] ** -0.5 if scale is None else scale
    if length <= _BLOCK or length % _BLOCK:
        seen = jnp.tril(jnp.ones((length, span), bool)) if mask is None else mask
        return _attend(queries, keys, values, seen, scale)

    def block(start: jax.Array) -> jax.Array:
        some = lax.dynamic_slice_in_dim(queries, start, _BLOCK, axis=2)
        if mask is None:
            seen = start + jnp.arange(_BLOCK)[:, None] >= jnp.arange(span)
        else:
            seen = lax.dynamic_slice_in_dim(mask, start, _BLOCK, axis=-2)
        return _attend(some, keys, values, seen, scale)

    blocks = lax.map(block, jnp.arange(0, length, _BLOCK))  # [T / _BLOCK, B, H, _BLOCK, Dh]
    return jnp.moveaxis(blocks, 0, 2).reshape(queries.shape)


def _attend(queries: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    batch, heads, length, size = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, length, size)
    scores = jnp.einsum("bkgtd,bksd->bkgts", grouped, keys, precision=_EXACT, preferred_element_type=jnp.float32)
    seen = seen if seen.ndim == 2 else seen[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * scale, -jnp.inf), axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgts,bksd->bkgtd", weights, values, precision=_EXACT)
    return mixed.reshape(queries.shape).astype(queries.dtype)


def update_cache(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """A cache [B, K, S, Dh] with keys or values [B, K, T, Dh] put at positions [T], the same for all texts, or [B, T];
    those of a sequence lie one after the other."""
    new = new.astype(cache.dtype)
    if positions.ndim == 1:
        return lax.dynamic_update_slice_in_dim(cache, new, positions[0], axis=2)
    return jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=1))(cache, new, positions[:, 0])
