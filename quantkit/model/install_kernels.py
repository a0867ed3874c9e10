"""Put the kernels that a backend offers besides its linears into a loaded model, each after a self-test."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.kernels.backend import ScoredAttention
from quantkit.kernels.check import within
from quantkit.kernels.dispatch import operations_for_floats
from quantkit.model.attention import PLAIN, CachedAttention, Scores, masked_attention
from quantkit.model.cache import KVCache
from quantkit.model.check_blocks import FLOATS, MANY, alike, drawn, same_blocks
from quantkit.model.decoder import Block, Decoder
from quantkit.model.feed_forward import Experts
from quantkit.model.fused_blocks import fused_blocks
from quantkit.model.linear import FloatLinear, QuantLinear, kernel_failure
from quantkit.tensors.cached_rows import CachedRows

_POSITIONS = 300  # of the cache that attention is tried on: more than kernels take in one piece
_WINDOW = 100  # the widest window that attention is tried with
_BENT = 0.1  # of a soft cap: the scores that attention is tried on, a third or fourth of the largest

_log = logging.getLogger(__name__)


def install_kernels(model: Decoder) -> None:
    """Put the backend's kernels for attention, float products and whole blocks into `model.ops`.

    Each is tried against what it replaces; where one is wrong, the rest of the model stays with torch's.
    """
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    offered = linears[0].backend.operations() if linears else operations_for_floats(model.device, model.dtype)
    if offered is None:
        return
    linear, max_tokens = offered.float_linear, offered.cached_attention_max_tokens
    attention = None if offered.cached_attention is None else _by_kernel(offered.cached_attention, max_tokens)
    if offered.single_threaded is not None:
        model.ops = replace(model.ops, single_threaded=offered.single_threaded)
    dtypes = {model.dtype} if offered.block is None else {model.dtype, offered.block.dtype or model.dtype}
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
            model.ops = replace(model.ops, cached_attention=attention, ragged=max_tokens is None)
        banked = [module for module in model.modules() if isinstance(module, Experts) and module.bank is not None]
        if banked and not _passes("experts", lambda: _same_experts(model, banked[0])):
            for experts in banked:
                experts.bank = None
        blocks = fused_blocks(model)
        if blocks is not None and not _passes("decoder blocks", lambda: same_blocks(model)):
            return
    model.ops = replace(model.ops, blocks=blocks)


def _by_kernel(kernel: ScoredAttention, max_tokens: int | None = None) -> CachedAttention:
    """The `CachedAttention` of a kernel for up to `max_tokens` tokens at a time, None for any number, with torch's for
    more."""

    def attention(
        queries: Tensor, keys: CachedRows, values: CachedRows, positions: Tensor, slots: Tensor | None,
        window: int | None, scores: Scores = PLAIN,
    ) -> Tensor:  # fmt: skip
        given = queries, keys, values, positions, slots, window
        if max_tokens is not None and queries.shape[2] > max_tokens:
            return masked_attention(*given, scores)
        return kernel(*given, scores.scale, scores.softcap, scores.sinks)

    return attention


def _passes(what: str, same_as_torch: Callable[[], bool]) -> bool:
    """Whether kernels give what torch does; if not, a warning says so."""
    reason = kernel_failure(same_as_torch)
    if reason is not None:
        _log.warning("%s by the compiled kernels %s; torch's are used", what, reason)
    return reason is None


def _same_linear(model: Decoder, linear: FloatLinear, dtypes: set[torch.dtype]) -> bool:
    """Whether products of rows of these dtypes, one and many, are right to float32 sums."""
    columns = model.config.hidden_size
    some = drawn(model, MANY + 33, columns)
    weight = some[MANY:].to(model.dtype)
    for dtype, count in itertools.product(dtypes, (1, MANY)):
        rows = some[:count].to(dtype)
        x, w = rows.double(), weight.double()
        sizes = torch.outer(torch.linalg.vector_norm(x, dim=1), torch.linalg.vector_norm(w, dim=1))
        if not within(linear(rows, weight), x @ w.t(), torch.finfo(torch.float32).eps * columns * sizes):
            return False
    return True


def _same_attention(
    model: Decoder, attention: CachedAttention, dtypes: set[torch.dtype], max_tokens: int | None
) -> bool:
    """Whether attention is the same for queries of these dtypes, over either kind of cache, for one token and for
    many of those that it is used for, of sequences in separate slots and at separate positions."""
    many = MANY if max_tokens is None else min(max_tokens, MANY)
    config = replace(model.config, layers=model.config.layers[:1])
    first = model.model.layers[0]
    assert isinstance(first, Block)
    scores = first.self_attn.scores
    windows = {layer.window and min(layer.window, _WINDOW) for layer in model.config.layers}
    stretch = _stretch(config, scores)
    every = torch.arange(_POSITIONS, device=model.device)
    slots = torch.tensor([2, 0], device=model.device)
    rows = 3, config.num_kv_heads, _POSITIONS, config.head_dim
    for cached in (model.dtype, torch.int8):
        cache = KVCache(config, 3, _POSITIONS, cached, model.device)
        keys, values = cache.update(0, every, drawn(model, *rows), drawn(model, *rows, seed=1))
        for dtype, tokens, window in itertools.product(dtypes, (1, many), windows):
            queries = (drawn(model, 2, config.num_heads, tokens, config.head_dim, seed=2) * stretch).to(dtype)
            positions = torch.stack([every[-tokens - 3 : -3], every[7 : 7 + tokens]])
            given = keys, values, positions, slots, window, scores
            found, right = attention(queries, *given), masked_attention(queries.double(), *given)
            # Kernels may round shares, and rows of an int8 cache, to the dtype of the queries: a few of its steps.
            share = FLOATS + (0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
            vectors = -1, config.head_dim
            if not alike(found.reshape(vectors), right.reshape(vectors), share):
                return False
    return True


def _stretch(config: ModelConfig, scores: Scores) -> float:
    """By what drawn queries are multiplied, so that a soft cap bends the largest of their scores by much."""
    scale = 1 / math.sqrt(config.head_dim) if scores.scale is None else scores.scale
    return max(1.0, _BENT * (scores.softcap or 0.0) / (scale * math.sqrt(config.head_dim)))


def _same_experts(model: Decoder, experts: Experts) -> bool:
    """Whether a kernel gives for one row, and for many, what their experts give one by one."""
    linears = [module for module in experts.experts.modules() if isinstance(module, QuantLinear)]
    bank, some = experts.bank, drawn(model, MANY, model.config.hidden_size).to(model.dtype)
    assert bank is not None
    rounding = linears[0].backend.rounding(model.dtype)
    steps = torch.finfo(model.dtype).eps if model.dtype != torch.float32 else 0
    share = FLOATS + 2 * (rounding.activations + rounding.weights) + 4 * steps
    for count in (1, MANY):
        rows = some[:count]
        weights, chosen = experts.route(rows)
        found = bank(rows, weights, chosen)
        experts.bank = None
        right = experts.routed(rows, weights, chosen).double()
        experts.bank = bank
        if bool(right.isfinite().all()) and not alike(found, right, share):
            return False
    return True
