"""Put the kernels that a backend offers besides its linears into a loaded model, each after a
self-test.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.architectures.config import LayerConfig
from quantkit.kernels.backend import ScoredAttention
from quantkit.kernels.dispatch import is_within, operations_for_floats, self_test
from quantkit.model.attention import (
    PLAIN,
    CachedAttention,
    Scores,
    attend_with_mask,
    make_cached_attention,
    make_causal_attention,
)
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Block, Decoder, Step
from quantkit.model.feed_forward import Experts
from quantkit.model.fused_blocks import FusedBlocks, fuse_blocks
from quantkit.model.linear import FloatLinear, QuantLinear, kernel_failure
from quantkit.tensors.cached_rows import CachedRows

# Tokens that kernels are tried with besides one: more than those for few tokens take.
_MANY = 20
# share of a result that float32 arithmetic in another order may be off by, through a whole block
_FLOATS = 1e-3
# The widest window that blocks are tried with.
_FEW = 10
_STEPS = 2  # of a 16-bit dtype that a block may be off by, besides twice what its modules are
_POSITIONS = 300  # of the cache that attention is tried on: more than kernels take in one piece
# The widest window that attention is tried with.
_WINDOW = 100
_BENT = (
    0.1  # of a soft cap: the scores that attention is tried on, a third or fourth of the largest
)

_log = logging.getLogger(__name__)


def install_kernels(model: Decoder) -> None:
    """Put the backend's kernels for attention, float products and whole blocks into `model.ops`.

    Each is tried against what it replaces; where one is wrong, the rest of the model stays with
    torch's.
    """
    linears = [module for module in model.modules() if isinstance(module, QuantLinear)]
    if linears:
        offered = linears[0].backend.operations()
    else:
        offered = operations_for_floats(model.device, model.dtype)
    if offered is None:
        return
    linear = offered.float_linear
    max_tokens = offered.cached_attention_max_tokens
    if offered.cached_attention is None:
        attention = None
    else:
        attention = _by_kernel(offered.cached_attention, max_tokens)
    if offered.single_threaded is not None:
        model.ops = replace(model.ops, single_threaded=offered.single_threaded)
    if offered.block is None:
        dtypes = {model.dtype}
    else:
        dtypes = {model.dtype, offered.block.dtype or model.dtype}
    with torch.inference_mode():
        if linear is not None and not _passes(
            "float products", lambda: _same_linear(model, linear, dtypes)
        ):
            return
        if attention is not None and not _passes(
            "attention", lambda: _same_attention(model, attention, dtypes, max_tokens)
        ):
            return
        if linear is not None:
            model.ops = replace(model.ops, float_linear=linear)
        if attention is not None:
            model.ops = replace(model.ops, cached_attention=attention, ragged=max_tokens is None)
        banked = []
        for module in model.modules():
            if isinstance(module, Experts) and module.bank is not None:
                banked.append(module)
        if banked and not _passes("experts", lambda: _same_experts(model, banked[0])):
            for experts in banked:
                experts.bank = None
        blocks = fuse_blocks(model)
        if blocks is not None and not _passes("decoder blocks", lambda: _same_blocks(model)):
            return
    model.ops = replace(model.ops, blocks=blocks)


def _by_kernel(kernel: ScoredAttention, max_tokens: int | None = None) -> CachedAttention:
    """Return the `CachedAttention` of a kernel for up to `max_tokens` tokens at a time, None for
    any number, with torch's for more.
    """

    def attention(
        queries: Tensor,
        keys: CachedRows,
        values: CachedRows,
        positions: Tensor,
        slots: Tensor | None,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        given = queries, keys, values, positions, slots, window
        if max_tokens is not None and queries.shape[2] > max_tokens:
            return attend_with_mask(*given, scores)
        return kernel(*given, scores.scale, scores.softcap, scores.sinks)

    return attention


def _passes(operation: str, same_as_torch: Callable[[], bool]) -> bool:
    """Return whether kernels give what torch does; if not, a warning says so."""
    reason = kernel_failure(same_as_torch)
    if reason is not None:
        _log.warning("%s by the compiled kernels %s; torch's are used", operation, reason)
    return reason is None


def _same_linear(model: Decoder, linear: FloatLinear, dtypes: set[torch.dtype]) -> bool:
    """Return whether products of rows of these dtypes, one and many, are right to float32 sums."""
    columns = model.config.hidden_size
    some = _draw_normal(model, _MANY + 33, columns)
    weight = some[_MANY:].to(model.dtype)
    for dtype, count in itertools.product(dtypes, (1, _MANY)):
        rows = some[:count].to(dtype)
        x = rows.double()
        w = weight.double()
        sizes = torch.outer(torch.linalg.vector_norm(x, dim=1), torch.linalg.vector_norm(w, dim=1))
        if not is_within(
            linear(rows, weight), x @ w.t(), torch.finfo(torch.float32).eps * columns * sizes
        ):
            return False
    return True


def _same_attention(
    model: Decoder, attention: CachedAttention, dtypes: set[torch.dtype], max_tokens: int | None
) -> bool:
    """Return whether attention is the same for queries of these dtypes, over either kind of cache,
    for one token and for many of those that it is used for, of sequences in separate slots and at
    separate positions.
    """
    if max_tokens is None:
        many = _MANY
    else:
        many = min(max_tokens, _MANY)
    config = replace(model.config, layers=model.config.layers[:1])
    first = model.model.layers[0]
    assert isinstance(first, Block)
    scores = first.self_attn.scores
    windows = {layer.window and min(layer.window, _WINDOW) for layer in model.config.layers}
    if scores.scale is None:
        scale = 1 / math.sqrt(config.head_dim)
    else:
        scale = scores.scale
    # A soft cap is to bend the largest scores of the queries by much.
    stretch = max(1.0, _BENT * (scores.softcap or 0.0) / (scale * math.sqrt(config.head_dim)))
    every = torch.arange(_POSITIONS, device=model.device)
    slots = torch.tensor([2, 0], device=model.device)
    rows = 3, config.num_kv_heads, _POSITIONS, config.head_dim
    for cached in (model.dtype, torch.int8):
        cache = KVCache(config, 3, _POSITIONS, cached, model.device)
        keys, values = cache.update(
            0, every, _draw_normal(model, *rows), _draw_normal(model, *rows, seed=1)
        )
        for dtype, tokens, window in itertools.product(dtypes, (1, many), windows):
            queries = (
                _draw_normal(model, 2, config.num_heads, tokens, config.head_dim, seed=2) * stretch
            ).to(dtype)
            positions = torch.stack([every[-tokens - 3 : -3], every[7 : 7 + tokens]])
            given = keys, values, positions, slots, window, scores
            found = attention(queries, *given)
            right = attend_with_mask(queries.double(), *given)
            # Kernels may round shares, and rows of an int8 cache, to the dtype of the queries: a
            # few of its steps.
            share = _FLOATS + (0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
            vectors = -1, config.head_dim
            if not _is_close(found.reshape(vectors), right.reshape(vectors), share):
                return False
    return True


def _same_experts(model: Decoder, experts: Experts) -> bool:
    """Return whether a kernel gives for one row, and for many, what their experts give one by
    one.
    """
    linears = []
    for module in experts.experts.modules():
        if isinstance(module, QuantLinear):
            linears.append(module)
    bank = experts.bank
    some = _draw_normal(model, _MANY, model.config.hidden_size).to(model.dtype)
    assert bank is not None
    rounding = linears[0].backend.rounding(model.dtype)
    if model.dtype != torch.float32:
        steps = torch.finfo(model.dtype).eps
    else:
        steps = 0
    share = _FLOATS + 2 * (rounding.activations + rounding.weights) + 4 * steps
    for count in (1, _MANY):
        rows = some[:count]
        weights, chosen = experts.route(rows)
        found = bank(rows, weights, chosen)
        experts.bank = None
        right = experts.apply_chosen_experts(rows, weights, chosen).double()
        experts.bank = bank
        if bool(right.isfinite().all()) and not _is_close(found, right, share):
            return False
    return True


def _same_blocks(model: Decoder) -> bool:
    """Return whether the first block of each kind is the same through the kernels; and the head for
    what comes out, which may be of another dtype than the model.
    """
    kinds = {layer: number for number, layer in reversed(list(enumerate(model.config.layers)))}
    for layer, number in kinds.items():
        if layer.window is None:
            layer = layer
        else:
            layer = replace(layer, window=min(layer.window, _FEW))
        blocks = fuse_blocks(model, {number: layer})
        assert blocks is not None
        if not _same_head(model, blocks.dtype) or not _same_block(model, number, layer, blocks):
            return False
    return True


def _same_head(model: Decoder, dtype: torch.dtype) -> bool:
    head = model.lm_head
    if dtype == model.dtype or not isinstance(head, QuantLinear):
        return True
    return self_test(head.backend, head.scheme, model.device, dtype, head.scale_dtype) is None


def _same_block(model: Decoder, number: int, kind: LayerConfig, blocks: FusedBlocks) -> bool:
    """Return whether a block is the same through the kernels, for the first tokens, for one after
    them, and for many; in 16 bits as close to exact products as the modules are, but for little,
    and over either kind of cache.
    """
    config = model.config
    block = model.model.layers[number]
    assert isinstance(block, Block)
    windows = [kind.window] * config.num_layers
    # Where factors of positions are others than at the start.
    far = config.rope.original_context or 0
    max_tokens = blocks.kernel.max_tokens
    # Below the limit, kernels may differ for each number of tokens.
    stops = (3, 4, 4 + _MANY) if max_tokens is None else (max_tokens, max_tokens + 1)
    wide = blocks.dtype == torch.float32
    linears = [module for module in block.modules() if isinstance(module, QuantLinear)]
    # Both round the same activations, but for those between two integers: at worst each of four
    # products differs.
    rounding = _FLOATS + 4 * max(
        linear.backend.rounding(torch.float32).activations for linear in linears
    )
    x = _draw_normal(model, 1, stops[-1], config.hidden_size)
    if not wide:
        x = _small(model, block, x, far, windows).to(blocks.dtype).float()
    for cached in (torch.float32,) if wide else (blocks.dtype, torch.int8):
        found, rough, exact = (
            KVCache(config, 1, stops[-1], dtype, model.device)
            for dtype in (cached, cached, torch.float32)
        )
        for start, stop in zip((0, *stops), stops, strict=False):
            positions = torch.arange(start, stop, device=model.device)
            angles = model.rotary(positions + far)
            states = x[:, start:stop]
            steps = []
            for cache in (exact, rough):
                steps.append(
                    Step(angles, make_cached_attention(cache, positions, windows, attend_with_mask))
                )
            share = rounding
            if wide:
                right = block(states, steps[0])
            else:
                with _use_dequantized_weights(block):
                    right = block(states, steps[0])
            if not bool(right.isfinite().all()):
                # Nothing can be compared; NaN and Inf are reported with the logits.
                return True
            # What a block adds may be little.
            added = (right - states).double()
            if not wide:
                modules = block(states.to(blocks.dtype), steps[1]).double() - states.double()
                # A block may add nothing.
                tiny = torch.finfo(torch.float64).tiny
                off = float(((modules - added).abs() / _size(added).clamp_min(tiny)).max())
                share += _STEPS * torch.finfo(blocks.dtype).eps + 2 * off
            out = blocks(
                states.to(blocks.dtype, copy=True), positions, angles, found, first=start == 0
            )
            given = out.float() - states
            close = _close_choices(block, states, steps[0], share)
            for row in range(stop - start):
                if not close[row] and not _is_close(given[:, row], added[:, row], share):
                    return False
    return True


def _small(model: Decoder, block: Block, x: Tensor, far: int, windows: list[int | None]) -> Tensor:
    """Hidden states [1, T, D] of half the size of what the block adds to them: what it adds is not
    to drown in their rounding. A norm sees little of their size.
    """
    positions = torch.arange(x.shape[1], device=x.device)
    with _use_dequantized_weights(block):
        added = (
            block(x, Step(model.rotary(positions + far), make_causal_attention(positions, windows)))
            - x
        )
    size = float(added.square().mean().sqrt())
    if size > 0:
        return x * min(1.0, size / 2)
    return x


@contextmanager
def _use_dequantized_weights(block: Block) -> Iterator[None]:
    """Within it a block's products are those of the dequantized weights in float32."""

    def exact(linear: QuantLinear, x: Tensor) -> Tensor:
        # Floats only while it is used.
        weight = linear.rows(torch.arange(linear.out_features, device=x.device))
        return F.linear(x, weight, None if linear.bias is None else linear.bias.float())

    linears = [module for module in block.modules() if isinstance(module, QuantLinear)]
    for linear in linears:
        linear.forward = partial(exact, linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _close_choices(block: Block, states: Tensor, step: Step, share: float) -> list[bool]:
    """Return which of the rows [1, T, D] a router may send to other experts when it is off by a
    share of its logits: they may differ, and kernels may be right.
    """
    if not isinstance(block.mlp, Experts) or block.mlp.config.per_token == block.mlp.config.count:
        return [False] * states.shape[1]
    attended = block.finish("attention", states, block.inner("attention", states, step))
    logits = block.mlp.logits(block.inner("mlp", attended, step))[0]
    per_token = block.mlp.config.per_token
    ranked = logits.sort(-1, descending=True)[0]
    apart = ranked[:, per_token - 1] - ranked[:, per_token]
    return [bool(close) for close in apart <= share * logits.std(-1)]


def _is_close(result: Tensor, right: Tensor, share: float) -> bool:
    """Return whether each number is right but for a share of itself and of what is typical of its
    vector, [..., N].
    """
    return is_within(result, right, share * _size(right))


def _size(right: Tensor) -> Tensor:
    """Of each number and of what is typical of its vector, [..., N], together."""
    return right.square().mean(-1, keepdim=True).sqrt() + right.abs()


def _draw_normal(model: Decoder, *shape: int, seed: int = 0) -> Tensor:
    """Return the same float32 numbers each time, where the model is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.device)
