"""The decoder of one device: the same modules, but its linears and embedding are computed in JAX
and communicate with the other devices along the mesh axis `AXIS`.

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
from quantkit.model.cache import KeysAndValues, KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.load import meta_init
from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.scheme import QuantScheme
from quantkit.xla.bridge import apply, attend_by
from quantkit.xla.split import DeviceSplit

AXIS = "tp"

# With up to this many rows, the sums of all groups need less memory than the weight as floats.
_FEW_ROWS = 64
# Queries per block: the attention weights of only one block over all positions are in memory.
_BLOCK = 512
# By default, a TPU rounds the float32 inputs of products to bfloat16.
_EXACT = lax.Precision.HIGHEST

_dot = partial(lax.dot_general, precision=_EXACT, preferred_element_type=jnp.float32)

Finish = Callable[[jax.Array], jax.Array]
"""Combines the parts of a product that the devices computed."""


class _Sharded(nn.Module):
    """Stores a device's shard of a weight in arrays with the names in `weight`: the floats, or
    codes, scale and possibly zero.
    """

    def __init__(self, weight: Sequence[str]) -> None:
        super().__init__()
        self._weight = tuple(weight)
        # Placeholders: `bridge.run` replaces them by arrays with these names.
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
        """Multiply, [..., I] to [..., O]."""
        out: Tensor = apply(partial(_linear, self._finish), x, self.bias, *self.arrays)
        return out


class ShardedEmbedding(_Sharded):
    """A vocabulary-parallel embedding, of which a device has some rows. They are rounded to the
    dtype of the weight of `like`, which is that of activations.
    """

    def __init__(self, weight: Sequence[str], like: nn.Module) -> None:
        super().__init__(weight)
        # In a list, so that it is not a submodule, which would give its array a second name.
        self._like = [like]

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up tokens, [B, T] to [B, T, D]."""
        rows: Tensor = apply(vocab_parallel_embedding, tokens, *self.arrays)
        weight = self._like[0].weight
        assert isinstance(weight, Tensor)
        return rows.to(weight.dtype)


class ShardedTiedHead(nn.Module):
    """The head that is tied to an embedding."""

    def __init__(self, embedding: ShardedEmbedding, finish: Finish) -> None:
        super().__init__()
        # In a list, so that it is not a submodule, which would give its arrays second names.
        self._embedding = [embedding]
        self._finish = finish

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, [..., D] to [..., V]."""
        out: Tensor = apply(partial(_linear, self._finish), x, None, *self._embedding[0].arrays)
        return out


class ShardedCache(KVCache):
    """A device's shard of the cache. Updates write consecutive positions that the cache has."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.length = keys[0].shape[2]
        self.layers = []
        for layer_keys, layer_values in zip(keys, values, strict=True):
            self.layers.append(KeysAndValues(CachedRows(layer_keys), CachedRows(layer_values)))

    def update(
        self,
        layer: int,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor | None = None,
    ) -> tuple[CachedRows, CachedRows]:
        # JAX arrays cannot be written in place; XLA reuses the memory of the donated cache.
        stored = self.rows(layer)
        stored.keys = CachedRows(apply(update_cache, stored.keys.rows, keys, positions))
        stored.values = CachedRows(apply(update_cache, stored.values.rows, values, positions))
        return stored.keys, stored.values


def build_sharded_decoder(split: DeviceSplit) -> Decoder:
    """Build the decoder of one device without weights; `bridge.run` adds the arrays of
    `DeviceSplit.leaves` by their names.
    """
    attend_by(attention)
    with meta_init():
        model = Decoder(split.local)
    linears: dict[str, Linear] = {}
    for parameter in parameters(split.config):
        if parameter.linear:
            linears[parameter.module] = parameter.linear
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            finish = _finish(linears[name], split.config.vocab_size)
            arrays = _arrays(split.schemes.get(name))
            model.set_submodule(name, ShardedLinear(arrays, module.bias is not None, finish))
    embedding = ShardedEmbedding(_arrays(split.schemes.get(EMBEDDING)), model.model.norm)
    model.model.set_submodule("embed_tokens", embedding)
    if model.lm_head is None:
        model.lm_head = ShardedTiedHead(embedding, _finish(HEAD, split.config.vocab_size))
    return model.eval()


def _arrays(scheme: QuantScheme | None) -> list[str]:
    """List the names of a weight's arrays."""
    if scheme is None:
        return ["weight"]
    if scheme.symmetric:
        return ["codes", "scale"]
    return ["codes", "scale", "zero"]


def _finish(linear: Linear, vocabulary: int) -> Finish:
    if linear.parallel == "row":
        return all_reduce
    if linear.dims[0] == "vocab":
        # The shards of the vocabulary may be padded at the end.
        return partial(all_gather, size=vocabulary)
    # The next linear is row-parallel and needs only this device's columns.
    return lambda product: product


def _linear(finish: Finish, x: jax.Array, bias: jax.Array | None, *weight: Any) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    product = multiply_floats if len(weight) == 1 else multiply_quantized
    # Products are float32, but devices exchange them in the dtype of activations.
    out = finish(product(rows, *weight).astype(x.dtype))
    # After the all-reduce, so that the bias is added once.
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], -1)


def multiply_floats(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute ``x @ weight.T`` in float32: [M, I] and [O, I] to [M, O]."""
    return _dot(x, weight, (((1,), (1,)), ((), ())))


def multiply_quantized(
    x: jax.Array, codes: jax.Array, scale: jax.Array, zero: jax.Array | None = None
) -> jax.Array:
    """Compute ``x @ weight.T`` in float32 for ``weight = scale * (codes - zero)``, without the
    weight as floats in memory for few rows.

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
        # XLA fuses this into the product's input.
        weight = ((codes.astype(jnp.float32) - offset) * steps[..., None]).astype(x.dtype)
        return _dot(grouped, weight, (((1, 2), (0, 2)), ((), ())))
    # A group's scale multiplies its sum of products, [G, M, O], instead of the weight.
    sums = _dot(grouped, codes.astype(x.dtype), (((2,), (2,)), ((1,), (0,))))
    if zero is not None:
        # The zero point is constant in a group, so it multiplies the sum of the inputs, [G, M].
        inputs = grouped.astype(jnp.float32).sum(-1).T
        sums = sums - inputs[..., None] * zero.astype(jnp.float32)[:, None]
    return (sums * steps[:, None]).sum(0)


def vocab_parallel_embedding(tokens: jax.Array, weight: jax.Array, *steps: jax.Array) -> jax.Array:
    """Look up rows of an embedding of which each device has a part of the vocabulary: [B, T] and
    [V / N, D] to [B, T, D].

    Codes are [G, V / N, D / G], int4 or int8, with `steps`: scales and possibly zero points
    [G, V / N]. Their rows are float32.
    """
    count = weight.shape[-2]
    local_tokens = tokens - lax.axis_index(AXIS) * count
    is_local = (local_tokens >= 0) & (local_tokens < count)
    # Tokens of other devices look up row 0, which is then replaced by zeros.
    index = jnp.where(is_local, local_tokens, 0)
    rows = jnp.take(weight, index, axis=-2)
    if steps:
        # Rows of codes are [G, B, T, D / G].
        levels = rows.astype(jnp.float32)
        if len(steps) > 1:
            zero = jnp.take(steps[1], index, axis=1).astype(jnp.float32)
            levels = levels - zero[..., None]
        scale = jnp.take(steps[0], index, axis=1).astype(jnp.float32)
        rows = jnp.moveaxis(levels * scale[..., None], 0, 2).reshape(*tokens.shape, -1)
    # Only one device has the row of a token, so the sum is exact.
    return lax.psum(jnp.where(is_local[..., None], rows, 0), AXIS)


def all_reduce(product: jax.Array) -> jax.Array:
    """Sum the devices' parts of the same outputs."""
    return lax.psum(product, AXIS)


def all_gather(product: jax.Array, size: int) -> jax.Array:
    """Concatenate the devices' different outputs, and keep the first `size`."""
    return lax.all_gather(product, AXIS, axis=product.ndim - 1, tiled=True)[..., :size]


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array | None,
    scale: float | None = None,
) -> jax.Array:
    """Compute grouped-query attention, with the softmax in float32.

    Args:
        queries: [B, H, T, Dh].
        keys, values: [B, K, S, Dh]; each KV head serves H / K query heads.
        mask: [T, S] or [B, 1, T, S], true where a query sees a position; None for each up to its
            own.
        scale: a factor of the scores; None is one over the root of Dh.
    """
    length = queries.shape[2]
    span = keys.shape[2]
    if scale is None:
        scale = queries.shape[3] ** -0.5
    # Prompts are padded to multiples of the block size beyond it.
    if length <= _BLOCK or length % _BLOCK:
        if mask is None:
            mask = jnp.tril(jnp.ones((length, span), bool))
        return _attend(queries, keys, values, mask, scale)

    def block(start: jax.Array) -> jax.Array:
        block_queries = lax.dynamic_slice_in_dim(queries, start, _BLOCK, axis=2)
        if mask is None:
            block_mask = start + jnp.arange(_BLOCK)[:, None] >= jnp.arange(span)
        else:
            block_mask = lax.dynamic_slice_in_dim(mask, start, _BLOCK, axis=-2)
        return _attend(block_queries, keys, values, block_mask, scale)

    # One block after the other: [T / _BLOCK, B, H, _BLOCK, Dh].
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
    if mask.ndim != 2:
        # A dimension for the query heads that share a KV head.
        mask = mask[:, :, None]
    weights = jax.nn.softmax(jnp.where(mask, scores * scale, -jnp.inf), axis=-1)
    weights = weights.astype(values.dtype)
    mixed = jnp.einsum("bkgts,bksd->bkgtd", weights, values, precision=_EXACT)
    return mixed.reshape(queries.shape).astype(queries.dtype)


def update_cache(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Write keys or values [B, K, T, Dh] to a cache [B, K, S, Dh] at positions [T], the same for
    all texts, or [B, T]. The positions of a sequence are consecutive.
    """
    new = new.astype(cache.dtype)
    if positions.ndim == 1:
        return lax.dynamic_update_slice_in_dim(cache, new, positions[0], axis=2)
    # Within `vmap` the batch dimension is absent, so positions are the second one.
    return jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=1))(cache, new, positions[:, 0])
