"""The decoder as one device runs it: the same modules, with linears and embedding that know of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import torch
from torch import Tensor, nn

from quantkit.architectures.names import EMBEDDING
from quantkit.architectures.topology import HEAD, Linear, parameters
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder
from quantkit.model.load import meta_init
from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.scheme import QuantScheme
from quantkit.xla import products
from quantkit.xla.bridge import apply, attend_by
from quantkit.xla.split import DeviceSplit

Finish = Callable[[jax.Array], jax.Array]
"""Makes the whole of a product that a device has computed its part of."""


class _Sharded(nn.Module):
    """Has a device's shard of a weight, in arrays named `weight`: the floats, or codes, scale and perhaps zero."""

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
    """A vocabulary-parallel embedding: a device has some of its rows, which are rounded to the dtype of the weight of
    `like`, that of activations."""

    def __init__(self, weight: Sequence[str], like: nn.Module) -> None:
        super().__init__(weight)
        self._like = [like]  # not a submodule: its array has one name

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        look_up = products.vocab_parallel_embedding if len(self._weight) == 1 else products.vocab_parallel_codes
        rows: Tensor = apply(look_up, tokens, *self.arrays)
        weight = self._like[0].weight
        assert isinstance(weight, Tensor)
        return rows.to(weight.dtype)


class ShardedTiedHead(nn.Module):
    """The head that is tied to an embedding."""

    def __init__(self, embedding: ShardedEmbedding, finish: Finish) -> None:
        super().__init__()
        self._embedding = [embedding]  # not a submodule: its arrays have one name each
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
        self, layer: int, positions: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None = None
    ) -> tuple[CachedRows, CachedRows]:
        for stored, new in ((self.keys, keys), (self.values, values)):
            stored[layer] = CachedRows(apply(products.update_cache, stored[layer].rows, new, positions))
        return self.keys[layer], self.values[layer]


def sharded_decoder(split: DeviceSplit) -> Decoder:
    """The decoder of one device, without weights; it takes the arrays of `DeviceSplit.leaves` by their names."""
    attend_by(products.attention)
    with meta_init():
        model = Decoder(split.local)
    linears = {parameter.module: parameter.linear for parameter in parameters(split.config) if parameter.linear}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            finish = _finish(linears[name], split.config.vocab_size)
            linear = ShardedLinear(_arrays(split.schemes.get(name)), module.bias is not None, finish)
            model.set_submodule(name, linear)
    embedding = ShardedEmbedding(_arrays(split.schemes.get(EMBEDDING)), model.model.norm)
    model.model.set_submodule("embed_tokens", embedding)
    if model.lm_head is None:
        model.lm_head = ShardedTiedHead(embedding, _finish(HEAD, split.config.vocab_size))
    return model.eval()


def _arrays(scheme: QuantScheme | None) -> list[str]:
    """The names of a weight's arrays."""
    if scheme is None:
        return ["weight"]
    return ["codes", "scale"] if scheme.symmetric else ["codes", "scale", "zero"]


def _finish(linear: Linear, vocabulary: int) -> Finish:
    if linear.parallel == "row":
        return products.all_reduce
    if linear.dims[0] == "vocab":
        return partial(products.all_gather, size=vocabulary)
    return lambda product: product


def _linear(finish: Finish, x: jax.Array, bias: jax.Array | None, *weight: Any) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    product = products.float_product if len(weight) == 1 else products.quantized_product
    out = finish(product(rows, *weight).astype(x.dtype))
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], -1)
