"""Decoder blocks of up to 16 tokens in five launches each: queries, keys and values; attention; its output; gate and
up; down. Weights lie as the linears have them, so that larger steps may run the modules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from quantkit.kernels.block import BlockSettings, BlockStep, BlockWeights, PreparedLinear, RunBlocks
from quantkit.kernels.triton_attention import attention_counters, joined_attention
from quantkit.kernels.triton_projections import (
    ACTIVATIONS,
    MAX_TOKENS,
    added_product,
    gated_product,
    weighted_states,
)
from quantkit.kernels.triton_qkv import projected_heads

FEATURES = frozenset({
    "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "clip_qkv", "window", "rotary", "query_scaling_beta",
    "attention_scale", "attention_softcap", "sinks", "residual_multiplier", "activation", "activation_limit",
    "activation_alpha",
})  # fmt: skip
"""What they serve, see `BlockKernel`; of norms of queries and keys those of each head."""

_DTYPES = (torch.bfloat16, torch.float16)
_HEADS = 16  # what head sizes are multiples of, up to the most
_MAX_HEAD = 256

_Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, int]


@dataclass(frozen=True)
class _Norm:
    """A norm's weights, float32 [D], divided by a power of two, so that none is above 1: nothing that they are
    multiplied by grows beyond float16."""

    weight: Tensor
    growth: float


@dataclass(frozen=True)
class _Layer:
    """A block's operands.

    Attributes:
        head_norms: float32 [2, Dh], or None.
        next_norm: of the block that comes next.
        arrived: attention's counters.
    """

    settings: BlockSettings
    qkv: _Operands
    out: _Operands
    gate_up: _Operands
    down: _Operands
    norm: _Norm
    mlp_norm: _Norm
    next_norm: _Norm
    head_norms: Tensor | None
    sinks: Tensor | None
    arrived: Tensor


def prepare_blocks(layers: Sequence[tuple[BlockWeights, BlockSettings]], dtype: torch.dtype) -> RunBlocks | None:
    """See `BlockKernel`; the linears' tensors are those of `TritonBackend.prepare`."""
    if dtype not in _DTYPES or not all(_serves(weights, settings) for weights, settings in layers):
        return None
    with torch.inference_mode(False), torch.no_grad():  # counters may be counted in outside of it as well
        norms = [_norm(weights.input_norm) for weights, _ in layers]
        prepared = [
            _layer(weights, settings, norm, following)
            for (weights, settings), norm, following in zip(layers, norms, [*norms[1:], norms[0]], strict=True)
        ]
    if norms[0].weight.is_cuda:
        for tensor in {id(one): one for layer in prepared for one in _tensors(layer)}.values():
            torch._dynamo.mark_static_address(tensor, guard=False)  # else each recorded step would copy it

    def run(x: Tensor, step: BlockStep) -> Tensor:
        states = x.flatten(0, 1).contiguous()
        weighted, squares = weighted_states(states, norms[0].weight)
        for number, layer in enumerate(prepared):
            states, weighted, squares = _run(layer, number, states, weighted, squares, step, len(x))
        return states.view(x.shape)

    return run


def _run(
    layer: _Layer, number: int, states: Tensor, weighted: Tensor, squares: Tensor, step: BlockStep, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The five launches of a block: hidden states [M, D], weighted for the next, and their sums of squares."""
    assert step.cached is not None
    own, where = layer.settings, (step.positions, step.slots)
    keys, values = step.cached[number]
    turn = step.angles[number] if own.rotary else (None, None)
    queries = projected_heads(
        weighted, squares, *layer.qkv, own.norm_eps, layer.norm.growth, layer.head_norms, own.clip_qkv or 0.0, *turn,
        step.query_scale, *where, batch, *keys, *values,
    )  # fmt: skip
    mixed = joined_attention(
        queries, *keys, *values, *where, own.window, layer.arrived, own.attention_scale, own.attention_softcap,
        layer.sinks,
    )  # fmt: skip
    states, weighted, squares = added_product(
        mixed.flatten(0, 1), states, *layer.out, layer.mlp_norm.weight, own.residual_multiplier
    )
    inner = gated_product(
        weighted, squares, *layer.gate_up, own.norm_eps, layer.mlp_norm.growth, ACTIVATIONS.index(own.activation),
        own.activation_limit or 0.0, own.activation_alpha,
    )  # fmt: skip
    found: tuple[Tensor, Tensor, Tensor] = added_product(
        inner, states, *layer.down, layer.next_norm.weight, own.residual_multiplier
    )
    return found


def _serves(weights: BlockWeights, settings: BlockSettings) -> bool:
    """Whether a block is one that the kernels serve."""
    size = settings.head_dim
    return (
        weights.experts is None and weights.attention_output_norm is None and weights.mlp_output_norm is None
        and weights.input_norm is not None and weights.mlp_norm is not None
        and size % _HEADS == 0 and size <= _MAX_HEAD
        and (weights.q_norm is None or len(weights.q_norm) == size)
    )  # fmt: skip


def _layer(weights: BlockWeights, settings: BlockSettings, norm: _Norm, next_norm: _Norm) -> _Layer:
    assert weights.gate_up is not None and weights.down is not None
    qkv, out = _operands(weights.qkv), _operands(weights.out)
    gate_up, down = _operands(weights.gate_up), _operands(weights.down)
    head_norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        head_norms = torch.stack([weights.q_norm, weights.k_norm])
    mlp_norm, heads = _norm(weights.mlp_norm), (settings.num_heads, settings.num_kv_heads)
    arrived = attention_counters(MAX_TOKENS, *heads, norm.weight.device)
    return _Layer(
        settings, qkv, out, gate_up, down, norm, mlp_norm, next_norm, head_norms, weights.sinks, arrived
    )  # fmt: skip


def _tensors(layer: _Layer) -> Iterator[Tensor]:
    """All that a block's kernels read or count in."""
    linears = layer.qkv, layer.out, layer.gate_up, layer.down
    norms = layer.norm.weight, layer.mlp_norm.weight, layer.next_norm.weight, layer.head_norms
    for one in (*chain(*linears), *norms, layer.sinks, layer.arrived):
        if isinstance(one, Tensor):
            yield one


def _operands(linear: PreparedLinear) -> _Operands:
    """Words, scales, zero points, bias, counters and group of a linear."""
    found = linear.prepared
    group = linear.scheme.group_size or 0
    return found["words"], found["scale"], found.get("zero"), linear.bias, found["arrived"], group


def _norm(weight: Tensor | None) -> _Norm:
    assert weight is not None
    largest = float(weight.abs().max())
    growth = 2.0 ** math.ceil(math.log2(largest)) if 0 < largest < math.inf else 1.0
    return _Norm(weight / growth, growth)
