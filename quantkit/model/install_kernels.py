"""Install the kernels that a backend offers besides its linears in a loaded model, each after a
self-test.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.config import LayerConfig
from quantkit.kernels.backend import (
    Backend,
    BlockKernel,
    OfferedKernels,
    ScoredAttention,
    StepKernels,
)
from quantkit.kernels.dispatch import BACKENDS, is_within, offer_kernels_for_floats, self_test
from quantkit.model.attention import (
    PLAIN,
    CachedAttention,
    Chunk,
    ScoreSettings,
    Span,
    attend_with_mask,
    make_cached_attention,
    make_causal_attention,
)
from quantkit.model.cache import KVCache, LayerStates
from quantkit.model.decoder import Block, Decoder, DecoderOps
from quantkit.model.feed_forward import Experts, stack_experts
from quantkit.model.fused_blocks import FusedBlocks, fuse_blocks
from quantkit.model.linear import FloatLinear, QuantLinear, float_linear, kernel_failure
from quantkit.model.mixers.attention import Attention
from quantkit.model.mixers.mixer import Step, make_cached_scan
from quantkit.model.norms import CenteredNorm
from quantkit.model.rope import compute_rotations
from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.qtensor import CACHED_ELEMENTS, row_chunks

# Tokens of the test with many tokens: more than the kernels for few tokens support.
_MANY_TOKENS = 20
# Relative error that float32 arithmetic in another order may cause in a complete block.
_FLOAT_ERROR = 1e-3
# The widest window, and the longest chunk, in tests of blocks: less than their number of tokens, so
# that they have an effect.
_BLOCK_WINDOW = 10
# Error of a block, in steps of a 16-bit dtype, allowed in addition to twice that of its modules.
_BLOCK_STEPS = 2
# Positions of the cache in tests of attention: more than kernels process in one piece.
_POSITIONS = 300
# The widest window in tests of attention.
_ATTENTION_WINDOW = 100
# Standard deviation of the scores in tests of attention, as a share of the softcap. The largest
# scores are three to four times as large.
_SCORE_DEVIATION = 0.1
_log = logging.getLogger(__name__)


def install_kernels(model: Decoder, allowed: Sequence[Backend] = BACKENDS) -> None:
    """Install the backend's kernels for attention, float products, experts and blocks in a model.
    Those of a model without quantized layers are of the first allowed backend that has some.

    Each kernel is compared with the operation that it replaces. After a failure, this and the
    following operations stay torch's; after that of a kernel for experts, only the experts' own.
    """
    offered = _offer_kernels(model, allowed)
    stack_experts(model, model.config, None if offered is None else offered.experts)
    if offered is None:
        return
    linear = offered.float_linear
    rounding = offered.float_rounding
    max_tokens = offered.cached_attention_max_tokens
    ragged = False
    if offered.cached_attention is None:
        attention = None
    else:
        attention = _wrap_kernel(offered.cached_attention, max_tokens)
    if offered.single_threaded is not None:
        model.ops = replace(model.ops, single_threaded=offered.single_threaded)
    if offered.block is None:
        dtypes = {model.dtype}
    else:
        # Blocks may compute in another dtype, in which attention and head then run as well.
        dtypes = {model.dtype, offered.block.dtype or model.dtype}
    with torch.inference_mode():
        step = offered.step
        if step is not None and _passes(
            "rotations, norms and drawing", lambda: _same_step(model, step)
        ):
            model.ops = _install_step(model, step)
        # First, because blocks use the banks.
        mixtures: list[Experts] = []
        for module in model.modules():
            if isinstance(module, Experts) and module.bank is not None:
                mixtures.append(module)
        if mixtures and not _passes("experts", lambda: _same_experts(model, mixtures[0], rounding)):
            for experts in mixtures:
                experts.bank = None
        if linear is not None:
            if not _passes("float products", lambda: _same_linear(model, linear, dtypes, rounding)):
                return
            model.ops = replace(model.ops, float_linear=_wrap_float_linear(linear))
        if attention is not None and model.config.attention_layers:
            if not _passes(
                "attention", lambda: _same_attention(model, attention, dtypes, max_tokens)
            ):
                return
            # Rows of one sequence that are separate in a step would read the same state.
            ragged = max_tokens is None and not model.config.keeps_states
            # Outside of blocks, kernels compute no chunks, and torch's attention copies the keys of
            # each row.
            has_chunks = any(layer.chunk is not None for layer in model.config.layers)
            model.ops = replace(
                model.ops, cached_attention=attention, ragged=ragged and not has_chunks
            )
        blocks = fuse_blocks(model, kernel=offered.block)
        if blocks is not None and not _passes(
            "decoder blocks", lambda: _same_blocks(model, offered.block, rounding)
        ):
            return
    if blocks is not None and blocks.kernel.max_tokens is None:
        model.ops = replace(model.ops, ragged=ragged)
    model.ops = replace(model.ops, blocks=blocks)


def _offer_kernels(model: Decoder, allowed: Sequence[Backend]) -> OfferedKernels | None:
    for module in model.modules():
        if isinstance(module, QuantLinear):
            return module.backend.offer_kernels()
    return offer_kernels_for_floats(model.device, model.dtype, allowed)


def _install_step(model: Decoder, kernels: StepKernels) -> DecoderOps:
    """Return the model's operations with kernels for those besides its blocks and products."""
    norm = model.model.norm

    def compute_angles(
        positions: Tensor, frequencies: Tensor, scale: float, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return compute_rotations(positions, frequencies, scale, head_dim)
        return kernels.rotations(positions, frequencies, scale, head_dim)

    # Kernels know no offset, so the weight includes it. A float32 weight without one is shared.
    weight = norm.weight.detach().float()
    if norm.offset:
        weight = weight + norm.offset

    def normalize(states: Tensor) -> Tensor:
        return kernels.norm(states, weight, norm.eps, isinstance(norm, CenteredNorm))

    return replace(
        model.ops,
        rotations=compute_angles,
        final_norm=normalize,
        find_likeliest=kernels.find_likeliest,
    )


def _wrap_kernel(kernel: ScoredAttention, max_tokens: int | None = None) -> CachedAttention:
    """Wrap a kernel as `CachedAttention`. Steps with more than `max_tokens` tokens use torch; None
    sets no limit.
    """

    def attention(
        queries: Tensor,
        keys: CachedRows,
        values: CachedRows,
        positions: Tensor,
        slots: Tensor | None,
        window: int | None,
        scores: ScoreSettings = PLAIN,
    ) -> Tensor:
        arguments = queries, keys, values, positions, slots, window
        if max_tokens is not None and queries.shape[2] > max_tokens:
            return attend_with_mask(*arguments, scores)
        return kernel(*arguments, scores.scale, scores.softcap, scores.sinks)

    return attention


def _wrap_float_linear(kernel: FloatLinear) -> FloatLinear:
    """Wrap a kernel so that torch multiplies where gradients are needed, which kernels lack."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return float_linear(x, weight)
        return kernel(x, weight)

    return linear


def _passes(operation: str, same_as_torch: Callable[[], bool]) -> bool:
    """Compare kernels with torch, and log a warning if they differ."""
    reason = kernel_failure(same_as_torch)
    if reason is not None:
        _log.warning("%s by the compiled kernels %s; torch's are used", operation, reason)
    return reason is None


def _same_linear(
    model: Decoder, linear: FloatLinear, dtypes: set[torch.dtype], rounding: float
) -> bool:
    """Check products of one row and of many in these dtypes, up to the relative error of
    activations and that of float32 sums.
    """
    columns = model.config.hidden_size
    # 33 outputs are no multiple of a vector's width, so the kernel's remainder is tested too.
    samples = _draw_normal(model, _MANY_TOKENS + 33, columns)
    weight = samples[_MANY_TOKENS:].to(model.dtype)
    for dtype, count in itertools.product(dtypes, (1, _MANY_TOKENS)):
        rows = samples[:count].to(dtype)
        x = rows.double()
        w = weight.double()
        # The error bound of a sum of products: eps * columns * |x| * |w| (Cauchy-Schwarz).
        sizes = torch.outer(torch.linalg.vector_norm(x, dim=1), torch.linalg.vector_norm(w, dim=1))
        tolerance = (torch.finfo(torch.float32).eps * columns + rounding) * sizes
        if not is_within(linear(rows, weight), x @ w.t(), tolerance):
            return False
    return True


def _same_step(model: Decoder, kernels: StepKernels) -> bool:
    """Compare rotations, norms and drawing with torch's, for one row and for many."""
    ops = _install_step(model, kernels)
    # Far apart, and beyond the original context.
    positions = torch.arange(_MANY_TOKENS) * (1 + (model.config.rope.original_context or 0))
    states = _draw_normal(model, _MANY_TOKENS, model.config.hidden_size)
    # The largest value is in the remainder of the kernel's spans in some rows.
    logits = _draw_normal(model, _MANY_TOKENS, 33)
    for count in (1, _MANY_TOKENS):
        right = model.rotary(positions[:count])
        actual = model.rotary(positions[:count], None, ops.rotations)
        # Both round the angle to the same float32; what follows is off by a few of its steps.
        for own, torchs in ((actual.cosine, right.cosine), (actual.sine, right.sine)):
            if not is_within(own, torchs, torch.full_like(torchs, _FLOAT_ERROR)):
                return False
        normed = model.model.norm(states[:count])
        if ops.final_norm is not None and not _is_close(
            ops.final_norm(states[:count]), normed, _FLOAT_ERROR
        ):
            return False
        tokens, checked_tokens = kernels.find_likeliest(logits[:count])
        likeliest = logits[:count].argmax(-1)
        if not (torch.equal(tokens, likeliest) and torch.equal(checked_tokens, likeliest)):
            return False
    return True


def _same_attention(
    model: Decoder, attention: CachedAttention, dtypes: set[torch.dtype], max_tokens: int | None
) -> bool:
    """Compare attention with torch's for queries of these dtypes, over float and int8 caches, for
    one token and for as many as it supports, of sequences in different slots and at different
    positions.
    """
    if max_tokens is None:
        many = _MANY_TOKENS
    else:
        many = min(max_tokens, _MANY_TOKENS)
    # By size and number of heads, the layers that have them.
    kinds: dict[tuple[int, int], list[int]] = {}
    for number in model.config.attention_layers:
        kind = model.config.head_dim_of(number), model.config.kv_heads_of(number)
        kinds.setdefault(kind, []).append(number)
    for layers in kinds.values():
        if not _same_attention_of_layers(model, attention, dtypes, many, layers):
            return False
    return True


def _same_attention_of_layers(
    model: Decoder,
    attention: CachedAttention,
    dtypes: set[torch.dtype],
    many: int,
    layers: Sequence[int],
) -> bool:
    """Compare attention with torch's for layers with the same heads; see `_same_attention`."""
    first_block = model.model.layers[layers[0]]
    assert isinstance(first_block, Block) and isinstance(first_block.mixer, Attention)
    config = replace(model.config, layers=(model.config.layers[layers[0]],))
    scores = first_block.mixer.scores
    head_dim = config.head_dim_of(0)
    windows: set[int | None] = set()
    for number in layers:
        window = model.config.layers[number].window
        windows.add(window and min(window, _ATTENTION_WINDOW))
    if scores.scale is None:
        scale = 1 / math.sqrt(head_dim)
    else:
        scale = scores.scale
    # Scores of normal queries and keys have this standard deviation. The queries are stretched so
    # that a softcap changes the largest scores by much, and shrunk if a query would see one key
    # alone, as scores that are not divided would let it.
    deviation = scale * math.sqrt(head_dim)
    stretch = max(min(deviation, 1.0), _SCORE_DEVIATION * (scores.softcap or 0.0)) / deviation
    every = torch.arange(_POSITIONS, device=model.device)
    # Not in order, and one slot is unused.
    slots = torch.tensor([2, 0], device=model.device)
    rows = 3, config.kv_heads_of(0), _POSITIONS, head_dim
    for cached in (model.dtype, torch.int8):
        cache = KVCache(config, 3, _POSITIONS, cached, model.device)
        keys, values = cache.update(
            0, every, _draw_normal(model, *rows), _draw_normal(model, *rows, seed=1)
        )
        for dtype, tokens, window in itertools.product(dtypes, (1, many), windows):
            queries = _draw_normal(model, 2, config.num_heads, tokens, head_dim, seed=2)
            queries = (queries * stretch).to(dtype)
            positions = torch.stack([every[-tokens - 3 : -3], every[7 : 7 + tokens]])
            arguments = keys, values, positions, slots, window, scores
            actual = attention(queries, *arguments)
            right = attend_with_mask(queries.double(), *arguments)
            share = _FLOAT_ERROR
            if dtype != torch.float32:
                # Kernels may round shares, and rows of an int8 cache, to the dtype of the queries:
                # a few of its steps.
                share += 4 * torch.finfo(dtype).eps
            vectors = -1, head_dim
            if not _is_close(actual.reshape(vectors), right.reshape(vectors), share):
                return False
    return True


def _same_experts(model: Decoder, experts: Experts, float_rounding: float) -> bool:
    """Compare a kernel with the loop over experts, for one row and for many."""
    roundings = [float_rounding]
    for module in experts.experts.modules():
        if isinstance(module, QuantLinear):
            rounding = module.backend.rounding(model.dtype)
            roundings.append(rounding.activations + rounding.weights)
    bank = experts.bank
    samples = _draw_normal(model, _MANY_TOKENS, model.config.hidden_size).to(model.dtype)
    assert bank is not None
    # Inner states and outputs are rounded to a 16-bit dtype, in both computations.
    steps = torch.finfo(model.dtype).eps if model.dtype != torch.float32 else 0
    share = _FLOAT_ERROR + 2 * max(roundings) + 4 * steps
    for count in (1, _MANY_TOKENS):
        rows = samples[:count]
        weights, chosen = experts.route(rows)
        states = experts.compute_expert_inputs(rows)
        actual = experts.apply_chosen_experts(states, weights, chosen)
        # Without a bank, the loop over experts runs.
        experts.bank = None
        right = experts.apply_chosen_experts(states, weights, chosen).double()
        experts.bank = bank
        # NaN and Inf in the weights are reported with the logits.
        if bool(right.isfinite().all()) and not _is_close(actual, right, share):
            return False
    return True


def _same_blocks(
    model: Decoder, kernel: BlockKernel | None = None, float_rounding: float = 0.0
) -> bool:
    """Compare the first block of each kind with the kernels, and the head with the dtype of their
    hidden states, which may not be the model's.
    """
    # In reverse, so that the first layer of a kind is the one that remains.
    kinds = {layer: number for number, layer in reversed(list(enumerate(model.config.layers)))}
    for layer, number in kinds.items():
        if layer.window is not None:
            layer = replace(layer, window=min(layer.window, _BLOCK_WINDOW))
        if layer.chunk is not None:
            layer = replace(layer, chunk=min(layer.chunk, _BLOCK_WINDOW))
        blocks = fuse_blocks(model, {number: layer}, kernel=kernel)
        assert blocks is not None
        if not _same_head(model, blocks.dtype):
            return False
        if not _same_block(model, number, layer, blocks, float_rounding):
            return False
    return True


def _same_head(model: Decoder, dtype: torch.dtype) -> bool:
    head = model.lm_head
    if dtype == model.dtype or not isinstance(head, QuantLinear):
        return True
    return self_test(head.backend, head.scheme, model.device, dtype, head.scale_dtype) is None


def _same_block(
    model: Decoder,
    number: int,
    kind: LayerConfig,
    blocks: FusedBlocks,
    float_rounding: float,
) -> bool:
    """Compare a block's kernel with its modules for the first tokens, for one more and for many. In
    16 bits, the kernel must be about as close to exact products as the modules are, over float and
    int8 caches.
    """
    config = model.config
    block = model.model.layers[number]
    assert isinstance(block, Block)
    span: Span = kind.window if kind.chunk is None else Chunk(kind.chunk)
    spans = [span] * config.num_layers
    # Positions after the original context, where the scaling of queries differs from the start.
    far = config.rope.original_context or 0
    if config.query_scale is not None:
        far = max(far, config.query_scale.floor)
    max_tokens = blocks.kernel.max_tokens
    if max_tokens is None:
        stops: tuple[int, ...] = 3, 4, 4 + _MANY_TOKENS
    else:
        # Below the limit, kernels may differ for each number of tokens.
        stops = max_tokens, max_tokens + 1
    wide = blocks.dtype == torch.float32
    linears = [module for module in block.modules() if isinstance(module, QuantLinear)]
    # Both round the same activations, except for those half-way between two integers. In the worst
    # case, each of the four products of a block differs by one such step.
    steps_of_activations = [float_rounding]
    for linear in linears:
        steps_of_activations.append(linear.backend.rounding(torch.float32).activations)
    rounding = _FLOAT_ERROR + 4 * max(steps_of_activations)
    x = _draw_normal(model, 1, stops[-1], config.hidden_size)
    if not wide:
        x = _shrink_states(model, block, x, far, spans).to(blocks.dtype).float()
    for cached in (torch.float32,) if wide else (blocks.dtype, torch.int8):
        kernel_cache = KVCache(config, 1, stops[-1], cached, model.device)
        rough_cache = KVCache(config, 1, stops[-1], cached, model.device)
        exact_cache = KVCache(config, 1, stops[-1], torch.float32, model.device)
        for start, stop in zip((0, *stops), stops, strict=False):
            positions = torch.arange(start, stop, device=model.device)
            angles = model.rotary(positions + far)
            states = x[:, start:stop]
            steps = []
            for cache in (exact_cache, rough_cache):
                attend = make_cached_attention(cache, positions, spans, attend_with_mask)
                steps.append(Step(angles, attend, make_cached_scan(cache, positions)))
            share = rounding
            before = _copy_states(exact_cache, number)
            # Float32 kernels round activations as the quantized modules do.
            with _use_float32_weights(block, dequantized=not wide):
                right = block(states, steps[0])
            if not bool(right.isfinite().all()):
                # Nothing can be compared; NaN and Inf are reported with the logits.
                return True
            # Compare without the residual, because a block may add little to it.
            added = (right - states).double()
            if not wide:
                modules = block(states.to(blocks.dtype), steps[1]).double() - states.double()
                # Avoids a division by zero if a block adds nothing.
                tiny = torch.finfo(torch.float64).tiny
                off = float(
                    ((modules - added).abs() / _measure_error_scale(added).clamp_min(tiny)).max()
                )
                share += _BLOCK_STEPS * torch.finfo(blocks.dtype).eps + 2 * off
            out = blocks(
                # A copy, because kernels may write to the hidden states.
                states.to(blocks.dtype, copy=True),
                positions,
                angles,
                kernel_cache,
                is_prefill=start == 0,
            )
            kernel_added = out.float() - states
            after = _copy_states(exact_cache, number)
            # It runs the mixer again, whose states would advance twice.
            _restore_states(exact_cache, number, before)
            close = _find_close_choices(block, states, steps[0], share)
            _restore_states(exact_cache, number, after)
            for row in range(stop - start):
                if not close[row] and not _is_close(kernel_added[:, row], added[:, row], share):
                    return False
    return True


def _copy_states(cache: KVCache, layer: int) -> list[Tensor]:
    """Copy what a layer keeps of sequences in place of keys and values; nothing for attention,
    which only writes the same rows again.
    """
    stored = cache.layers[layer]
    if not isinstance(stored, LayerStates):
        return []
    return [state.clone() for state in stored.tensors()]


def _restore_states(cache: KVCache, layer: int, states: Sequence[Tensor]) -> None:
    """Replace the states of a layer by copies from `_copy_states`."""
    # Not strict: of attention nothing was copied.
    for stored, state in zip(cache.layers[layer].tensors(), states, strict=False):
        stored.copy_(state)


def _shrink_states(
    model: Decoder, block: Block, x: Tensor, far: int, spans: Sequence[Span]
) -> Tensor:
    """Scale hidden states [1, T, D] to at most half the size of what the block adds to them, so
    that their rounding does not hide it. Because of the norms, the block's output hardly depends on
    their size.
    """
    positions = torch.arange(x.shape[1], device=x.device)
    step = Step(model.rotary(positions + far), make_causal_attention(positions, spans))
    with _use_float32_weights(block, dequantized=True):
        added = block(x, step) - x
    size = float(added.square().mean().sqrt())
    if size > 0:
        return x * min(1.0, size / 2)
    return x


@contextmanager
def _use_float32_weights(block: Block, *, dequantized: bool) -> Iterator[None]:
    """Let a block's float linears, and with `dequantized` also its quantized ones, multiply by
    their weights in float32 within the context.
    """

    # Some rows at a time: in float32, a fused linear is a tenth as large as all weights of a large
    # model in 4 bits, which are in memory already.
    def exact(linear: QuantLinear | nn.Linear, x: Tensor) -> Tensor:
        y = x.new_empty((*x.shape[:-1], linear.out_features))
        for start, stop in row_chunks(linear.out_features, linear.in_features, CACHED_ELEMENTS):
            if isinstance(linear, QuantLinear):
                weight = linear.rows(torch.arange(start, stop, device=x.device))
            else:
                weight = linear.weight[start:stop].float()
            y[..., start:stop] = F.linear(x, weight)
        if linear.bias is not None:
            y += linear.bias.float()
        return y

    linears: list[QuantLinear | nn.Linear] = []
    for module in block.modules():
        if isinstance(module, nn.Linear) or (dequantized and isinstance(module, QuantLinear)):
            linears.append(module)
    for linear in linears:
        linear.forward = partial(exact, linear)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears:
            # Removes the instance's attribute, so that the class's method is found again.
            del linear.forward


def _find_close_choices(block: Block, states: Tensor, step: Step, share: float) -> list[bool]:
    """Mark the rows [1, T, D] that a router may send to other experts if its logits have an error
    of this share. For these rows, a correct kernel may give other results.
    """
    if not isinstance(block.mlp, Experts) or block.mlp.config.per_token == block.mlp.config.count:
        return [False] * states.shape[1]
    # The states may be wider than the weights of float linears.
    with _use_float32_weights(block, dequantized=False):
        mixed = states
        if "mixer" in block.branches:
            mixed = block.finish("mixer", states, block.inner("mixer", states, step))
        source = block.choose_feed_forward_input(states, mixed)
        logits = block.mlp.logits(block.inner("mlp", source, step))[0]
    ranks = logits
    if block.mlp.score_correction is not None:
        # No score is off by more than its logit.
        ranks = block.mlp.correct_scores(block.mlp.compute_scores(logits))
    per_token = block.mlp.config.per_token
    ranked = ranks.sort(-1, descending=True)[0]
    # The distance between the last expert that is chosen and the first that is not.
    apart = ranked[:, per_token - 1] - ranked[:, per_token]
    return [bool(close) for close in apart <= share * logits.std(-1)]


def _is_close(result: Tensor, right: Tensor, share: float) -> bool:
    """Return whether each number's error is at most a share of its `_measure_error_scale`."""
    return is_within(result, right, share * _measure_error_scale(right))


def _measure_error_scale(right: Tensor) -> Tensor:
    """Add each number's absolute value and the root mean square of its vector, [..., N]."""
    return right.square().mean(-1, keepdim=True).sqrt() + right.abs()


def _draw_normal(model: Decoder, *shape: int, seed: int = 0) -> Tensor:
    """Draw the same normal float32 numbers each time, on the model's device."""
    # Drawn on the CPU: other devices have other generators.
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.device)
