"""Put into a loaded model what its backend can do besides linear layers, once it has shown that it can."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.kernels.check import fault, within
from quantkit.kernels.dispatch import operations_for_floats
from quantkit.model.attention import CachedAttention, cached_attention, for_few, masked_attention
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Blocks, Decoder
from quantkit.model.fused_blocks import fused_blocks
from quantkit.model.product import Product, for_few_rows
from quantkit.model.qlinear import QuantLinear

_POSITIONS = 300  # of the cache that attention is tried on: more than kernels take in one go
_MANY = 20  # tokens that it is tried with besides one: more than those for a few take
_FLOATS = 1e-3  # share of a result that float32 arithmetic in another order may be off by, through a whole block

_log = logging.getLogger(__name__)


def install_kernels(model: Decoder) -> None:
    """Attention, products of floats and whole blocks by the backend, each tried against what it replaces."""
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    operations = linears[0].backend.operations() if linears else operations_for_floats(model.device, model.dtype)
    if operations is None:
        return
    linear, lookup, most = operations.linear, operations.lookup, operations.lookup_most
    if operations.alone is not None:
        model.alone = operations.alone
    dtypes = {model.dtype} if operations.block is None else {model.dtype, torch.float32}  # of blocks
    few = operations.linear_most
    with torch.inference_mode():
        if linear is not None and not _holds("products of floats", lambda: _same_linear(model, linear, dtypes, few)):
            return
        if lookup is not None and not _holds("attention", lambda: _same_lookup(model, lookup, dtypes, most)):
            return
        if linear is not None:
            model.linear = for_few_rows(linear, few)
        if lookup is not None:
            model.lookup = lookup if most is None else for_few(lookup, most)
        first = fused_blocks(model, 1)
        if first is not None and not _holds("decoder blocks", lambda: _same_block(model, first)):
            return
    model.blocks = fused_blocks(model)


def _holds(what: str, same_as_torch: Callable[[], bool]) -> bool:
    """Whether kernels give what torch does; if not, that is said."""
    reason = "are wrong on this machine"
    try:
        if same_as_torch():
            return True
    except Exception as error:  # of a driver or a compiler, which have kinds of their own
        reason = f"fail on this machine ({' '.join(str(error).split()) or type(error).__name__})"[:300]
    _log.warning("%s by the compiled kernels %s; torch's are used", what, reason)
    return False


def _same_linear(model: Decoder, linear: Product, dtypes: set[torch.dtype], most: int) -> bool:
    """Whether products of rows of these dtypes, one and as many as it is used for, are right to float32 sums."""
    columns = model.config.hidden_size
    drawn = _drawn(model, most + 33, columns)
    weight = drawn[most:].to(model.dtype)
    for dtype, count in itertools.product(dtypes, (1, most)):
        rows = drawn[:count].to(dtype)
        x, w = rows.double(), weight.double()
        sizes = torch.outer(torch.linalg.vector_norm(x, dim=1), torch.linalg.vector_norm(w, dim=1))
        if not within(linear(rows, weight), x @ w.t(), torch.finfo(torch.float32).eps * columns * sizes):
            return False
    return True


def _same_lookup(model: Decoder, lookup: CachedAttention, dtypes: set[torch.dtype], most: int | None) -> bool:
    """Whether attention is the same for queries of these dtypes, over either kind of cache, for one token and for
    many of those that it is used for."""
    many = _MANY if most is None else min(most, _MANY)
    config = dataclasses.replace(model.config, layers=model.config.layers[:1])
    every = torch.arange(_POSITIONS, device=model.device)
    rows = 2, config.num_kv_heads, _POSITIONS, config.head_dim
    for cached in (model.dtype, torch.int8):
        cache = KVCache(config, 2, _POSITIONS, cached, model.device)
        keys, values = cache.update(0, every, _drawn(model, *rows), _drawn(model, *rows, seed=1))
        for dtype, tokens in itertools.product(dtypes, (1, many)):
            queries = _drawn(model, 2, config.num_heads, tokens, config.head_dim, seed=2).to(dtype)
            given = keys, values, every[-tokens - 3 : -3], config.windows[0]
            found, right = lookup(queries, *given), masked_attention(queries.double(), *given)
            # Kernels may round shares, and rows of an int8 cache, to the dtype of the queries: a few of its steps.
            share = _FLOATS + (0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
            vectors = -1, config.head_dim
            if not _alike(found.reshape(vectors), right.reshape(vectors), share):
                return False
    return True


def _same_block(model: Decoder, first: Blocks) -> bool:
    """Whether the first block is the same through the kernels, for the first tokens, for one after them, and for
    many; and the head for what comes out, which is float32."""
    config, head = model.config, model.lm_head
    layer = model.model.layers[0]
    linears = [module for module in layer.modules() if isinstance(module, QuantLinear)]
    if isinstance(head, QuantLinear) and fault(
        head.backend, head.scheme, model.device, torch.float32, head.scale_dtype
    ):
        return False
    # Both ways round the same activations, but for those at an edge: at worst each of four products rounds anew.
    share = _FLOATS + 4 * max(linear.backend.rounding(torch.float32).activations for linear in linears)
    length = 4 + _MANY
    x = _drawn(model, 1, length, config.hidden_size)
    found, expected = (KVCache(config, 1, length, torch.float32, model.device) for _ in range(2))
    for start, stop in ((0, 3), (3, 4), (4, length)):
        positions = torch.arange(start, stop, device=model.device)
        angles = model.rotary(positions)
        attend = cached_attention(expected, positions, config.windows, masked_attention)
        states = x[:, start:stop]
        right = layer(states, angles, attend)
        if not bool(right.isfinite().all()):
            return True  # nothing can be told; whoever asks for logits is told of them
        out = first(states.clone(), positions, angles, found, first=start == 0)
        if not _alike(out - states, (right - states).double(), share):  # what a block adds may be little
            return False
    return True


def _alike(found: Tensor, right: Tensor, share: float) -> bool:
    """Whether each number is right but for a share of itself and of what is typical of its vector, [..., N]."""
    typical = right.square().mean(-1, keepdim=True).sqrt()
    return within(found, right, share * (typical + right.abs()))


def _drawn(model: Decoder, *shape: int, seed: int = 0) -> Tensor:
    """The same float32 numbers each time, where the model is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.device)
