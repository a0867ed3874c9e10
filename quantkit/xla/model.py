"""The decoder as one device runs it: the same modules, with linears and embedding that know of the
others, computed in JAX; `AXIS` is the devices'.

M rows, I inputs, O outputs, G groups of the weight's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import Tensor, nn

from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import HEAD, Linear, parameters
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.load import meta_init
from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.scheme import QuantScheme
from quantkit.xla.bridge import apply, attend_by
from quantkit.xla.split import DeviceSplit

AXIS = "tp"

# Up to which sums for each group take less memory than the weight as floats.
_FEW_ROWS = 64
# Queries of which the weights over all positions are in memory at once.
_BLOCK = 512
# A TPU would otherwise round float32 to bfloat16.
_EXACT = lax.Precision.HIGHEST

_dot = partial(lax.dot_general, precision=_EXACT, preferred_element_type=jnp.float32)

Finish = Callable[[jax.Array], jax.Array]
"""Makes the whole of a product that a device has computed its part of."""


class _Sharded(nn.Module):
    """Has a device's shard of a weight, in arrays named `weight`: the floats, or codes, scale
    and perhaps zero.
    """

    def __init__(self, weight: Sequence[str]) -> None:
        super().__init__()
        self._weight = tuple(weight)
        for name in weight:
            self.register_buffer(name, torch.empty(0, device="meta"))

    @property
    def arrays(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._weight]


class ShardedLinear(_Sharded):
    """A device's shard of a linear layer."""

    def __init__(self, weight: Sequence[str], bias: bool, finish: Finish) -> None:
        super().__init__(weight)
        self._finish = finish
        self.bias = nn.Parameter(torch.empty(0, device="meta")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        out: Tensor = apply(partial(_linear, self._finish), x, self.bias, *self.arrays)
        return out


class ShardedEmbedding(_Sharded):
    """A vocabulary-parallel embedding: a device has some of its rows, which are rounded to the
    dtype of the weight of `like`, that of activations.
    """

    def __init__(self, weight: Sequence[str], like: nn.Module) -> None:
        super().__init__(weight)
        # Not a submodule: its array has one name.
        self._like = [like]

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        rows: Tensor = apply(vocab_parallel_embedding, tokens, *self.arrays)
        weight = self._like[0].weight
        assert isinstance(weight, Tensor)
        return rows.to(weight.dtype)


class ShardedTiedHead(nn.Module):
    """The head that is tied to an embedding."""

    def __init__(self, embedding: ShardedEmbedding, finish: Finish) -> None:
        super().__init__()
        # Not a submodule: its arrays have one name each.
        self._embedding = [embedding]
        self._finish = finish

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        out: Tensor = apply(partial(_linear, self._finish), x, None, *self._embedding[0].arrays)
        return out


class ShardedCache(KVCache):
    """A device's shard of the cache; the positions of a sequence are consecutive, and inside it."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.length = keys[0].shape[2]
        self.keys, self.values = ([CachedRows(rows) for rows in given] for given in (keys, values))

    def update(
        self,
        layer: int,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor | None = None,
    ) -> tuple[CachedRows, CachedRows]:
        for stored, new in ((self.keys, keys), (self.values, values)):
            stored[layer] = CachedRows(apply(update_cache, stored[layer].rows, new, positions))
        return self.keys[layer], self.values[layer]


def build_sharded_decoder(split: DeviceSplit) -> Decoder:
    """Return the decoder of one device, without weights; it takes the arrays of
    `DeviceSplit.leaves` by their names.
    """
    attend_by(attention)
    with meta_init():
        model = Decoder(split.local)
    linears = {}
    for parameter in parameters(split.config):
        if parameter.linear:
            linears[parameter.module] = parameter.linear
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            finish = _finish(linears[name], split.config.vocab_size)
            linear = ShardedLinear(
                _arrays(split.schemes.get(name)), module.bias is not None, finish
            )
            model.set_submodule(name, linear)
    embedding = ShardedEmbedding(_arrays(split.schemes.get(EMBEDDING)), model.model.norm)
    model.model.set_submodule("embed_tokens", embedding)
    if model.lm_head is None:
        model.lm_head = ShardedTiedHead(embedding, _finish(HEAD, split.config.vocab_size))
    return model.eval()


def _arrays(scheme: QuantScheme | None) -> list[str]:
    """Return the names of a weight's arrays."""
    if scheme is None:
        return ["weight"]
    if scheme.symmetric:
        return ["codes", "scale"]
    return ["codes", "scale", "zero"]


def _finish(linear: Linear, vocabulary: int) -> Finish:
    if linear.parallel == "row":
        return all_reduce
    if linear.dims[0] == "vocab":
        return partial(all_gather, size=vocabulary)
    return lambda product: product


def _linear(finish: Finish, x: jax.Array, bias: jax.Array | None, *weight: Any) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    product = multiply_floats if len(weight) == 1 else multiply_quantized
    out = finish(product(rows, *weight).astype(x.dtype))
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], -1)


def multiply_floats(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x @ weight.T`` in float32: [M, I] and [O, I] to [M, O]."""
    return _dot(x, weight, (((1,), (1,)), ((), ())))


def multiply_quantized(
    x: jax.Array, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None
) -> jax.Array:
    """``x @ weight.T`` in float32 for ``weight = scale * (codes - zero)``, the weight never there
    as floats.

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
        if zero is None:
            offset = 0.0
        else:
            offset = zero.astype(jnp.float32)[..., None]
        # In passing.
        weight = ((codes.astype(jnp.float32) - offset) * steps[..., None]).astype(x.dtype)
        return _dot(grouped, weight, (((1, 2), (0, 2)), ((), ())))
    sums = _dot(grouped, codes.astype(x.dtype), (((2,), (2,)), ((1,), (0,))))  # [G, M, O]
    if zero is not None:
        inputs = grouped.astype(jnp.float32).sum(-1).T  # [G, M]
        sums = sums - inputs[..., None] * zero.astype(jnp.float32)[:, None]
    return (sums * steps[:, None]).sum(0)


def vocab_parallel_embedding(tokens: jax.Array, weight: jax.Array, *steps: jax.Array) -> jax.Array:
    """Rows of an embedding of which each device has some of the vocabulary: [B, T] and [V / N, D]
    to [B, T, D]. Of codes [G, V / N, D / G], int4 or int8, with `steps`, scales and perhaps zero
    points [G, V / N], in float32.
    """
    count = weight.shape[-2]
    own = tokens - lax.axis_index(AXIS) * count
    here = (own >= 0) & (own < count)
    at = jnp.where(here, own, 0)
    rows = jnp.take(weight, at, axis=-2)
    # Rows are [G, B, T, D / G]
    if steps:
        scale, *zero = (
            jnp.take(array, at, axis=1).astype(jnp.float32)[..., None] for array in steps
        )
        found = rows.astype(jnp.float32) - (zero[0] if zero else 0)
        rows = jnp.moveaxis(found * scale, 0, 2).reshape(*tokens.shape, -1)
    return lax.psum(jnp.where(here[..., None], rows, 0), AXIS)


def all_reduce(product: jax.Array) -> jax.Array:
    """Return what the devices have computed of the same outputs, added up."""
    return lax.psum(product, AXIS)


def all_gather(product: jax.Array, size: int) -> jax.Array:
    """Return what the devices have computed of different outputs, side by side; the first
    `size`.
    """
    return lax.all_gather(product, AXIS, axis=product.ndim - 1, tiled=True)[..., :size]


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array | None,
    scale: float | None = None,
) -> jax.Array:
    """Grouped-query attention, its softmax in float32.

    Args:
        queries: [B, H, T, Dh].
        keys, values: [B, K, S, Dh]; each KV head serves H / K query heads.
        mask: [T, S] or [B, 1, T, S], true where a query sees a position; None for each up to its
            own.
        scale: what products are multiplied by; None is one over the root of Dh.
    """
    length = queries.shape[2]
    span = keys.shape[2]
    if scale is None:
        scale = queries.shape[3] ** -0.5
    else:
        scale = scale
    if length <= _BLOCK or length % _BLOCK:
        if mask is None:
            seen = jnp.tril(jnp.ones((length, span), bool))
        else:
            seen = mask
        return _attend(queries, keys, values, seen, scale)

    def block(start: jax.Array) -> jax.Array:
        some = lax.dynamic_slice_in_dim(queries, start, _BLOCK, axis=2)
        if mask is None:
            seen = start + jnp.arange(_BLOCK)[:, None] >= jnp.arange(span)
        else:
            seen = lax.dynamic_slice_in_dim(mask, start, _BLOCK, axis=-2)
        return _attend(some, keys, values, seen, scale)

    # [T / _BLOCK, B, H, _BLOCK, Dh]
    blocks = lax.map(block, jnp.arange(0, length, _BLOCK))
    return jnp.moveaxis(blocks, 0, 2).reshape(queries.shape)


def _attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, scale: float
) -> jax.Array:
    batch, heads, length, size = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(batch, kv_heads, heads // kv_heads, length, size)
    scores = jnp.einsum(
        "bkgtd,bksd->bkgts", grouped, keys, precision=_EXACT, preferred_element_type=jnp.float32
    )
    if mask.ndim == 2:
        mask = mask
    else:
        mask = mask[:, :, None]
    weights = jax.nn.softmax(jnp.where(mask, scores * scale, -jnp.inf), axis=-1).astype(
        values.dtype
    )
    mixed = jnp.einsum("bkgts,bksd->bkgtd", weights, values, precision=_EXACT)
    return mixed.reshape(queries.shape).astype(queries.dtype)


def update_cache(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Return a cache [B, K, S, Dh] with keys or values [B, K, T, Dh] put at positions [T], the same
    for all texts, or [B, T]; those of a sequence lie one after the other.
    """
    new = new.astype(cache.dtype)
    if positions.ndim == 1:
        return lax.dynamic_update_slice_in_dim(cache, new, positions[0], axis=2)
    return jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=1))(cache, new, positions[:, 0])
