"""The decoder as one device runs it: the same modules, with linears and embedding that know of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import torch
from torch import Tensor, nn

from quantkit.model.cache import KVCache
from quantkit.model.decoder import Decoder, DecoderOps
from quantkit.model.load import meta_init
from quantkit.xla import products
from quantkit.xla.bridge import apply, attend_by
from quantkit.xla.split import COLUMNS, Layout

Finish = Callable[[jax.Array], jax.Array]
"""What makes the whole of a product that a device has computed its part of."""


class ShardedLinear(nn.Module):
    """A device's part of a linear layer, its weight floats or quantized."""

    def __init__(self, weight: Sequence[str], bias: bool, finish: Finish) -> None:
        """
        Args:
            weight: names of its arrays, in order: weight, or codes, scale and perhaps zero.
        """
        super().__init__()
        self._weight = tuple(weight)
        self._finish = finish
        for name in weight:
            self.register_buffer(name, torch.empty(0, device="meta"))
        self.bias = nn.Parameter(torch.empty(0, device="meta")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        weight = [getattr(self, name) for name in self._weight]
        out: Tensor = apply(partial(_linear, self._finish), x, self.bias, *weight)
        return out


class ShardedEmbedding(nn.Module):
    """Rows of an embedding of which a device has some of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, device="meta"))

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, T, D]."""
        rows: Tensor = apply(products.looked_up, tokens, self.weight)
        return rows


class ShardedCache(KVCache):
    """A device's part of the cache; positions are consecutive, and inside it."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.length = keys[0].shape[2]
        self.keys, self.values = list(keys), list(values)

    def update(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[layer] = apply(products.stored, self.keys[layer], keys, positions)
        self.values[layer] = apply(products.stored, self.values[layer], values, positions)
        return self.keys[layer], self.values[layer]


def sharded_decoder(layout: Layout) -> Decoder:
    """The decoder of one device, without weights; it takes the arrays of `Layout.leaves` by their names."""
    attend_by(products.attention)
    with meta_init():
        model = Decoder(layout.local)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            scheme = layout.schemes.get(name)
            weight = ["weight"] if scheme is None else ["codes", "scale"] if scheme.symmetric else [*_QUANTIZED]
            parent, _, child = name.rpartition(".")
            finish = _finish(child, layout.config.vocab_size)
            setattr(model.get_submodule(parent), child, ShardedLinear(weight, module.bias is not None, finish))
    model.model.embed_tokens = ShardedEmbedding()  # type: ignore[assignment]
    head = partial(_linear, _finish("lm_head", layout.config.vocab_size))
    model.ops = DecoderOps(float_linear=lambda x, weight: apply(head, x, None, weight))  # for a tied head
    return model.eval()


_QUANTIZED = ("codes", "scale", "zero")


def _finish(child: str, vocabulary: int) -> Finish:
    if child in COLUMNS:
        return products.summed
    return partial(products.gathered, size=vocabulary) if child == "lm_head" else lambda product: product


def _linear(finish: Finish, x: jax.Array, bias: jax.Array | None, *weight: Any) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    product = products.float_product if len(weight) == 1 else products.quantized_product
    out = finish(product(rows, *weight).astype(x.dtype))
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], -1)
