"""Put the kernels that a backend offers besides its linears into a loaded model, each after a self-test."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.kernels.check import self_test, within
from quantkit.kernels.dispatch import operations_for_floats
from quantkit.model.attention import (
    PlainAttention,
    cached_attention,
    for_few_tokens,
    for_plain_scores,
    masked_attention,
)
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Blocks, Decoder, Step
from quantkit.model.fused_blocks import fused_blocks
from quantkit.model.linear import FloatLinear, QuantLinear

_POSITIONS = 300  # of the cache that attention is tried on: more than kernels take in one piece
_MANY = 20  # tokens that kernels are tried with besides one: more than those for few tokens take
_FLOATS = 1e-3  # share of a result that float32 arithmetic in another order may be off by, through a whole block

_log = logging.getLogger(__name__)


def install_kernels(model: Decoder) -> None:
    """Put the backend's kernels for attention, float products and whole blocks into `model.ops`.

    Each is tried against what it replaces; where one is wrong, the rest of the model stays with torch's.
    """
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    offered = linears[0].backend.operations() if linears else operations_for_floats(model.device, model.dtype)
    if offered is None:
        return
    linear, attention, max_tokens = offered.float_linear, offered.cached_attention, offered.cached_attention_max_tokens
    if offered.single_threaded is not None:
        model.ops = replace(model.ops, single_threaded=offered.single_threaded)
    dtypes = {model.dtype} if offered.block is None else {model.dtype, torch.float32}  # of blocks
    with torch.inference_mode():
        if linear is not None and not _passes("float products", lambda: _same_linear(model, linear, dtypes)):
            return
        if attention is not None and not _passes(
            "attention", lambda: _same_attention(model, attention, dtypes, max_tokens)
        ):
            return
        if linear is not None:
            model.ops = replace(model.ops, float_linear=linear)
        if attention is not None:
            chosen = for_plain_scores(attention)
            chosen = chosen if max_tokens is None else for_few_tokens(chosen, max_tokens)
            model.ops = replace(model.ops, cached_attention=chosen, ragged=max_tokens is None)
        first = fused_blocks(model, 1)
        if first is not None and not _passes("decoder blocks", lambda: _same_block(model, first)):
            return
    model.ops = replace(model.ops, blocks=fused_blocks(model))


def _passes(what: str, same_as_torch: Callable[[], bool]) -> bool:
    """Whether kernels give what torch does; if not, a warning says so."""
    reason = "are wrong on this machine"
    try:
        if same_as_torch():
            return True
    except Exception as error:  # of a driver or a compiler, which have kinds of their own
        reason = f"fail on this machine ({' '.join(str(error).split()) or type(error).__name__})"[:300]
    _log.warning("%s by the compiled kernels %s; torch's are used", what, reason)
    return False


def _same_linear(model: Decoder, linear: FloatLinear, dtypes: set[torch.dtype]) -> bool:
    """Whether products of rows of these dtypes, one and many, are right to float32 sums."""
    columns = model.config.hidden_size
    drawn = _drawn(model, _MANY + 33, columns)
    weight = drawn[_MANY:].to(model.dtype)
    for dtype, count in itertools.product(dtypes, (1, _MANY)):
        rows = drawn[:count].to(dtype)
        x, w = rows.double(), weight.double()
        sizes = torch.outer(torch.linalg.vector_norm(x, dim=1), torch.linalg.vector_norm(w, dim=1))
        if not within(linear(rows, weight), x @ w.t(), torch.finfo(torch.float32).eps * columns * sizes):
            return False
    return True


def _same_attention(
    model: Decoder, attention: PlainAttention, dtypes: set[torch.dtype], max_tokens: int | None
) -> bool:
    """Whether attention is the same for queries of these dtypes, over either kind of cache, for one token and for
    many of those that it is used for, of sequences in slots of their own and at positions of their own."""
    many = _MANY if max_tokens is None else min(max_tokens, _MANY)
    config = replace(model.config, layers=model.config.layers[:1])
    every = torch.arange(_POSITIONS, device=model.device)
    slots = torch.tensor([2, 0], device=model.device)
    rows = 3, config.num_kv_heads, _POSITIONS, config.head_dim
    for cached in (model.dtype, torch.int8):
        cache = KVCache(config, 3, _POSITIONS, cached, model.device)
        keys, values = cache.update(0, every, _drawn(model, *rows), _drawn(model, *rows, seed=1))
        for dtype, tokens in itertools.product(dtypes, (1, many)):
            queries = _drawn(model, 2, config.num_heads, tokens, config.head_dim, seed=2).to(dtype)
            positions = torch.stack([every[-tokens - 3 : -3], every[7 : 7 + tokens]])
            given = keys, values, positions, slots, config.windows[0]
            found, right = attention(queries, *given), masked_attention(queries.double(), *given)
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
    if isinstance(head, QuantLinear) and self_test(
        head.backend, head.scheme, model.device, torch.float32, head.scale_dtype
    ):
        return False
    # Both round the same activations, but for those between two integers: at worst each of four products differs.
    share = _FLOATS + 4 * max(linear.backend.rounding(torch.float32).activations for linear in linears)
    length = 4 + _MANY
    x = _drawn(model, 1, length, config.hidden_size)
    found, expected = (KVCache(config, 1, length, torch.float32, model.device) for _ in range(2))
    for start, stop in ((0, 3), (3, 4), (4, length)):
        positions = torch.arange(start, stop, device=model.device)
        angles = model.rotary(positions)
        step = Step(angles, cached_attention(expected, positions, config.windows, masked_attention))
        states = x[:, start:stop]
        right = layer(states, step)
        if not bool(right.isfinite().all()):
            return True  # nothing can be compared; NaN and Inf are reported where logits are asked for
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
