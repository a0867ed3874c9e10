"""Put into a loaded model what its backend can do besides linear layers, once it has shown that it can."""

from __future__ import annotations

import logging

import torch

from quantkit.kernels.check import same
from quantkit.model.attention import Lookup, for_few, masked_lookup, over_cache
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Blocks, Decoder
from quantkit.model.fused import fused_blocks
from quantkit.model.qlinear import QuantLinear

_log = logging.getLogger(__name__)


def put_operations(model: Decoder) -> None:
    """Attention, products of floats and whole blocks by the backend, each tried against what it replaces."""
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    operations = linears[0].backend.operations() if linears else None
    if operations is None:
        return
    table = torch.randn(33, model.config.hidden_size, generator=_generator()).to(model.dtype)
    with torch.inference_mode():
        if not same(operations.linear(table[:1], table[1:]), table[:1].double() @ table[1:].double().t()):
            return _refuse("products of floats")
        if not _same_lookup(model, operations.lookup):
            return _refuse("attention")
        model.linear = operations.linear
        model.lookup = for_few(operations.lookup)
        first = fused_blocks(model, 1)
        if first is not None and not _same_block(model, first):
            return _refuse("decoder blocks")
    model.blocks = fused_blocks(model)


def _refuse(what: str) -> None:
    _log.warning("%s by the compiled kernels are wrong on this machine; torch's are used", what)


def _same_lookup(model: Decoder, lookup: Lookup) -> bool:
    config, generator = model.config, _generator()
    stored = (2, config.num_kv_heads, 9, config.head_dim)
    keys, values = (torch.randn(stored, generator=generator).to(model.dtype) for _ in range(2))
    queries = torch.randn(2, config.num_heads, 2, config.head_dim, generator=generator)
    positions = torch.tensor([4, 5])
    window = config.windows[0]
    return same(
        lookup(queries, keys, values, positions, window), masked_lookup(queries, keys, values, positions, window)
    )


def _same_block(model: Decoder, first: Blocks) -> bool:
    """Whether the first block is the same through the kernels, for tokens in one go and for one after them."""
    config = model.config
    x = torch.randn(1, 4, config.hidden_size, generator=_generator())
    found, expected = (KVCache(config, 1, 4, torch.float32, "cpu") for _ in range(2))
    for start, stop in ((0, 3), (3, 4)):
        positions = torch.arange(start, stop)
        angles = model.rotary(positions)
        attend = over_cache(expected, positions, config.windows, masked_lookup)
        right = model.model.layers[0](x[:, start:stop], angles, attend)
        if not bool(right.isfinite().all()):
            return True  # nothing can be told; whoever asks for logits is told of them
        attend = over_cache(found, positions, config.windows, masked_lookup)
        if not same(first(x[:, start:stop].clone(), positions, angles, attend, found), right):
            return False
    return True


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
