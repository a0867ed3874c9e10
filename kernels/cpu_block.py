"""What the C++ kernel for whole blocks is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.kernels.block import BlockSettings, BlockStep, BlockWeights, PreparedLinear, RunBlocks


def prepare_blocks(
    block: Callable[..., None], layers: Sequence[tuple[BlockWeights, BlockSettings]], dtype: torch.dtype
) -> RunBlocks:
    """See `BlockKernel`.

    Args:
        block: the operator, which updates float32 hidden states [B, T, D] in place.
    """
    operands = [(settings.rotary, *_weights(weights), *_settings(weights, settings)) for weights, settings in layers]

    def run(x: Tensor, step: BlockStep) -> Tensor:
        for number, (rotary, *operand) in enumerate(operands):
            cosine, sine = step.angles[number]
            if not rotary:
                cosine, sine = torch.ones_like(cosine), torch.zeros_like(sine)
            keys, values = ((None, None),) * 2 if step.cached is None else step.cached[number]
            block(x, cosine, sine, step.query_scale, step.positions, step.slots, *keys, *values, step.first, *operand)
        return x

    return run


def _weights(weights: BlockWeights) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Of attention and of the feed-forward, in the order in which the operator takes them."""
    attention = [
        weights.input_norm, *_packed(weights.qkv), weights.q_norm, weights.k_norm, weights.sinks, *_packed(weights.out),
        weights.attention_output_norm,
    ]  # fmt: skip
    inside = [*_packed(weights.gate_up), *_packed(weights.down)]
    if (experts := weights.experts) is not None:
        banks = (bank for own in (experts.gate_up, experts.down) for bank in (own.prepared["packed"], own.bias))
        inside = [experts.router, experts.router_bias, *banks, *inside, experts.shared_gate]
    return attention, [weights.mlp_norm, *inside, weights.mlp_output_norm]


def _settings(weights: BlockWeights, own: BlockSettings) -> tuple[Any, ...]:
    """What a block does, in the order in which the operator takes it."""
    experts = weights.experts
    return (
        own.num_heads, own.num_kv_heads, own.window or 0, own.attention_scale, own.attention_softcap, own.clip_qkv,
        own.activation, own.activation_limit, own.norm_eps, own.residual_multiplier,
        *(() if experts is None else (experts.per_token, experts.normalized)),
    )  # fmt: skip


def _packed(linear: PreparedLinear | None) -> tuple[Tensor | None, Tensor | None]:
    if linear is None:
        return None, None
    return linear.prepared["packed"], None if linear.bias is None else linear.bias.float()
