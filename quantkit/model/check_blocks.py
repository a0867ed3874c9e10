"""Try kernels for whole decoder blocks against the blocks' modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.config import LayerConfig
from quantkit.kernels.check import self_test, within
from quantkit.model.attention import cached_attention, causal_attention, masked_attention
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Block, Decoder, Step
from quantkit.model.feed_forward import Experts
from quantkit.model.fused_blocks import FusedBlocks, fused_blocks
from quantkit.model.linear import QuantLinear

MANY = 20
"""Tokens that kernels are tried with besides one: more than those for few tokens take."""

FLOATS = 1e-3
"""Share of a result that float32 arithmetic in another order may be off by, through a whole block."""

_FEW = 10  # the widest window that blocks are tried with
_STEPS = 2  # of a 16-bit dtype that a block may be off by, besides twice what its modules are


def same_blocks(model: Decoder) -> bool:
    """Whether the first block of each kind is the same through the kernels; and the head for what comes out, which may
    be of another dtype than the model."""
    kinds = {layer: number for number, layer in reversed(list(enumerate(model.config.layers)))}
    for layer, number in kinds.items():
        layer = layer if layer.window is None else replace(layer, window=min(layer.window, _FEW))
        blocks = fused_blocks(model, {number: layer})
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
    """Whether a block is the same through the kernels, for the first tokens, for one after them, and for many; in 16
    bits as close to exact products as the modules are, but for little, and over either kind of cache."""
    config, block = model.config, model.model.layers[number]
    assert isinstance(block, Block)
    windows = [kind.window] * config.num_layers
    far = config.rope.original_context or 0  # where factors of positions are others than at the start
    max_tokens = blocks.kernel.max_tokens
    # Below the limit, kernels may differ for each number of tokens.
    stops = (3, 4, 4 + MANY) if max_tokens is None else (max_tokens, max_tokens + 1)
    wide = blocks.dtype == torch.float32
    linears = [module for module in block.modules() if isinstance(module, QuantLinear)]
    # Both round the same activations, but for those between two integers: at worst each of four products differs.
    rounding = FLOATS + 4 * max(linear.backend.rounding(torch.float32).activations for linear in linears)
    x = drawn(model, 1, stops[-1], config.hidden_size)
    if not wide:
        x = _small(model, block, x, far, windows).to(blocks.dtype).float()
    for cached in (torch.float32,) if wide else (blocks.dtype, torch.int8):
        found, rough, exact = (
            KVCache(config, 1, stops[-1], dtype, model.device) for dtype in (cached, cached, torch.float32)
        )
        for start, stop in zip((0, *stops), stops, strict=False):
            positions = torch.arange(start, stop, device=model.device)
            angles, states = model.rotary(positions + far), x[:, start:stop]
            steps = [
                Step(angles, cached_attention(cache, positions, windows, masked_attention)) for cache in (exact, rough)
            ]
            share = rounding
            if wide:
                right = block(states, steps[0])
            else:
                with _dequantized(block):
                    right = block(states, steps[0])
            if not bool(right.isfinite().all()):
                return True  # nothing can be compared; NaN and Inf are reported with the logits
            added = (right - states).double()  # what a block adds may be little
            if not wide:
                modules = block(states.to(blocks.dtype), steps[1]).double() - states.double()
                tiny = torch.finfo(torch.float64).tiny  # a block may add nothing
                off = float(((modules - added).abs() / _size(added).clamp_min(tiny)).max())
                share += _STEPS * torch.finfo(blocks.dtype).eps + 2 * off
            out = blocks(states.to(blocks.dtype, copy=True), positions, angles, found, first=start == 0)
            given = out.float() - states
            close = _close_choices(block, states, steps[0], share)
            for row in range(stop - start):
                if not close[row] and not alike(given[:, row], added[:, row], share):
                    return False
    return True


def _small(model: Decoder, block: Block, x: Tensor, far: int, windows: list[int | None]) -> Tensor:
    """Hidden states [1, T, D] of half the size of what the block adds to them: what it adds is not to drown in their
    rounding. A norm sees little of their size."""
    positions = torch.arange(x.shape[1], device=x.device)
    with _dequantized(block):
        added = block(x, Step(model.rotary(positions + far), causal_attention(positions, windows))) - x
    size = float(added.square().mean().sqrt())
    return x * min(1.0, size / 2) if size > 0 else x


@contextmanager
def _dequantized(block: Block) -> Iterator[None]:
    """Within it a block's products are those of the dequantized weights in float32."""
    linears = {name: module for name, module in block.named_modules() if isinstance(module, QuantLinear)}
    for name, linear in linears.items():
        block.set_submodule(name, _Dequantized(linear))
    try:
        yield
    finally:
        for name, linear in linears.items():
            block.set_submodule(name, linear)


class _Dequantized(nn.Module):
    """A quantized linear by its definition; its weight is floats only while it is used."""

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__()
        self._linear = [linear]  # no submodule of this one

    def forward(self, x: Tensor) -> Tensor:
        (own,) = self._linear
        every = torch.arange(own.out_features, device=x.device)
        weight = own.backend.rows(own.prepared, own.scheme, own.in_features, every)
        return F.linear(x, weight, None if own.bias is None else own.bias.float())


def _close_choices(block: Block, states: Tensor, step: Step, share: float) -> list[bool]:
    """Which of the rows [1, T, D] a router may send to other experts when it is off by a share of its logits: they may
    differ, and kernels may be right."""
    if not isinstance(block.mlp, Experts) or block.mlp.config.per_token == block.mlp.config.count:
        return [False] * states.shape[1]
    attended = block.finish("attention", states, block.inner("attention", states, step))
    logits = block.mlp.logits(block.inner("mlp", attended, step))[0]
    per_token = block.mlp.config.per_token
    ranked = logits.sort(-1, descending=True)[0]
    apart = ranked[:, per_token - 1] - ranked[:, per_token]
    return [bool(close) for close in apart <= share * logits.std(-1)]


def alike(found: Tensor, right: Tensor, share: float) -> bool:
    """Whether each number is right but for a share of itself and of what is typical of its vector, [..., N]."""
    return within(found, right, share * _size(right))


def _size(right: Tensor) -> Tensor:
    """Of each number and of what is typical of its vector, [..., N], together."""
    return right.square().mean(-1, keepdim=True).sqrt() + right.abs()


def drawn(model: Decoder, *shape: int, seed: int = 0) -> Tensor:
    """The same float32 numbers each time, where the model is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.device)
