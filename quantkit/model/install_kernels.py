"""Put the kernels that a backend offers besides its linears into a loaded model, each after a self-test."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.kernels.backend import ScoredAttention
from quantkit.kernels.check import self_test, within
from quantkit.kernels.dispatch import operations_for_floats
from quantkit.model.attention import (
    PLAIN,
    CachedAttention,
    Scores,
    cached_attention,
    for_few_tokens,
    masked_attention,
)
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Block, Decoder, Step
from quantkit.model.feed_forward import Experts
from quantkit.model.fused_blocks import fused_blocks
from quantkit.model.linear import FloatLinear, QuantLinear
from quantkit.tensors.cached_rows import CachedRows

_POSITIONS = 300  # of the cache that attention is tried on: more than kernels take in one piece
_MANY = 20  # tokens that kernels are tried with besides one: more than those for few tokens take
_WINDOW, _FEW = 100, 10  # the widest windows that attention and blocks are tried with
_BENT = 0.1  # of a soft cap: the scores that attention is tried on, a third or fourth of the largest
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
    linear, max_tokens = offered.float_linear, offered.cached_attention_max_tokens
    attention = None if offered.cached_attention is None else _by_kernel(offered.cached_attention)
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
            chosen = attention if max_tokens is None else for_few_tokens(attention, max_tokens)
            model.ops = replace(model.ops, cached_attention=chosen, ragged=max_tokens is None)
        banked = [module for module in model.modules() if isinstance(module, Experts) and module.bank is not None]
        if banked and not _passes("experts", lambda: _same_experts(model, banked[0])):
            for experts in banked:
                experts.bank = None
        blocks = fused_blocks(model)
        if blocks is not None and not _passes("decoder blocks", lambda: _same_blocks(model)):
            return
    model.ops = replace(model.ops, blocks=blocks)


def _by_kernel(kernel: ScoredAttention) -> CachedAttention:
    def attention(
        queries: Tensor, keys: CachedRows, values: CachedRows, positions: Tensor, slots: Tensor | None,
        window: int | None, scores: Scores = PLAIN,
    ) -> Tensor:  # fmt: skip
        rows = queries, keys, values, positions, slots
        return kernel(*rows, window, scores.scale, scores.softcap, scores.sinks)

    return attention


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
    model: Decoder, attention: CachedAttention, dtypes: set[torch.dtype], max_tokens: int | None
) -> bool:
    """Whether attention is the same for queries of these dtypes, over either kind of cache, for one token and for
    many of those that it is used for, of sequences in slots of their own and at positions of their own."""
    many = _MANY if max_tokens is None else min(max_tokens, _MANY)
    config = replace(model.config, layers=model.config.layers[:1])
    scores = _block(model, 0).self_attn.scores
    windows = {layer.window and min(layer.window, _WINDOW) for layer in model.config.layers}
    stretch = _stretch(config, scores)
    every = torch.arange(_POSITIONS, device=model.device)
    slots = torch.tensor([2, 0], device=model.device)
    rows = 3, config.num_kv_heads, _POSITIONS, config.head_dim
    for cached in (model.dtype, torch.int8):
        cache = KVCache(config, 3, _POSITIONS, cached, model.device)
        keys, values = cache.update(0, every, _drawn(model, *rows), _drawn(model, *rows, seed=1))
        for dtype, tokens, window in itertools.product(dtypes, (1, many), windows):
            queries = (_drawn(model, 2, config.num_heads, tokens, config.head_dim, seed=2) * stretch).to(dtype)
            positions = torch.stack([every[-tokens - 3 : -3], every[7 : 7 + tokens]])
            given = keys, values, positions, slots, window, scores
            found, right = attention(queries, *given), masked_attention(queries.double(), *given)
            # Kernels may round shares, and rows of an int8 cache, to the dtype of the queries: a few of its steps.
            share = _FLOATS + (0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
            vectors = -1, config.head_dim
            if not _alike(found.reshape(vectors), right.reshape(vectors), share):
                return False
    return True


def _stretch(config: ModelConfig, scores: Scores) -> float:
    """By what drawn queries are multiplied, so that a soft cap bends the largest of their scores by much."""
    scale = 1 / math.sqrt(config.head_dim) if scores.scale is None else scores.scale
    return max(1.0, _BENT * (scores.softcap or 0.0) / (scale * math.sqrt(config.head_dim)))


def _same_experts(model: Decoder, experts: Experts) -> bool:
    """Whether a kernel gives for one row, and for many, what their experts give one by one."""
    linears = [module for module in experts.experts.modules() if isinstance(module, QuantLinear)]
    bank, drawn = experts.bank, _drawn(model, _MANY, model.config.hidden_size).to(model.dtype)
    assert bank is not None
    rounding = linears[0].backend.rounding(model.dtype)
    steps = torch.finfo(model.dtype).eps if model.dtype != torch.float32 else 0
    share = _FLOATS + 2 * (rounding.activations + rounding.weights) + 4 * steps
    for count in (1, _MANY):
        rows = drawn[:count]
        weights, chosen = experts.route(rows)
        found = bank(rows, weights, chosen)
        experts.bank = None
        right = experts.routed(rows, weights, chosen).double()
        experts.bank = bank
        if bool(right.isfinite().all()) and not _alike(found, right, share):
            return False
    return True


def _same_blocks(model: Decoder) -> bool:
    """Whether the first block of each kind is the same through the kernels; and the head for what comes out, which is
    float32."""
    head = model.lm_head
    if isinstance(head, QuantLinear) and self_test(
        head.backend, head.scheme, model.device, torch.float32, head.scale_dtype
    ):
        return False
    kinds = {layer: number for number, layer in reversed(list(enumerate(model.config.layers)))}
    return all(_same_block(model, number, layer) for layer, number in kinds.items())


def _same_block(model: Decoder, number: int, kind: LayerConfig) -> bool:
    """Whether a block is the same through the kernels, for the first tokens, for one after them, and for many."""
    config, layer = model.config, _block(model, number)
    kind = kind if kind.window is None else replace(kind, window=min(kind.window, _FEW))
    blocks = fused_blocks(model, {number: kind})
    assert blocks is not None
    windows = [kind.window] * config.num_layers
    far = config.rope.original_context or 0  # where factors of positions are others than at the start
    linears = [module for module in layer.modules() if isinstance(module, QuantLinear)]
    # Both round the same activations, but for those between two integers: at worst each of four products differs.
    share = _FLOATS + 4 * max(linear.backend.rounding(torch.float32).activations for linear in linears)
    length = 4 + _MANY
    x = _drawn(model, 1, length, config.hidden_size)
    found, expected = (KVCache(config, 1, length, torch.float32, model.device) for _ in range(2))
    for start, stop in ((0, 3), (3, 4), (4, length)):
        positions = torch.arange(start, stop, device=model.device)
        angles = model.rotary(positions + far)
        step = Step(angles, cached_attention(expected, positions, windows, masked_attention))
        states = x[:, start:stop]
        right = layer(states, step)
        if not bool(right.isfinite().all()):
            return True  # nothing can be compared; NaN and Inf are reported where logits are asked for
        out = blocks(states.clone(), positions, angles, found, first=start == 0)
        added, expected_sum = out - states, (right - states).double()  # what a block adds may be little
        close = _close_choices(layer, states, step, share)
        for row in range(stop - start):
            if not close[row] and not _alike(added[:, row], expected_sum[:, row], share):
                return False
    return True


def _close_choices(layer: Block, states: Tensor, step: Step, share: float) -> list[bool]:
    """Which of the rows [1, T, D] a router may send to other experts when it is off by a share of its logits: they may
    differ, and kernels may be right."""
    if not isinstance(layer.mlp, Experts) or layer.mlp.config.per_token == layer.mlp.config.count:
        return [False] * states.shape[1]
    attended = layer.finish("attention", states, layer.inner("attention", states, step), step)
    logits = layer.mlp.logits(layer.inner("mlp", attended, step))[0]
    per_token = layer.mlp.config.per_token
    ranked = logits.sort(-1, descending=True)[0]
    apart = ranked[:, per_token - 1] - ranked[:, per_token]
    return [bool(close) for close in apart <= share * logits.std(-1)]


def _block(model: Decoder, number: int) -> Block:
    block = model.model.layers[number]
    assert isinstance(block, Block)
    return block


def _alike(found: Tensor, right: Tensor, share: float) -> bool:
    """Whether each number is right but for a share of itself and of what is typical of its vector, [..., N]."""
    typical = right.square().mean(-1, keepdim=True).sqrt()
    return within(found, right, share * (typical + right.abs()))


def _drawn(model: Decoder, *shape: int, seed: int = 0) -> Tensor:
    """The same float32 numbers each time, where the model is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.device)
