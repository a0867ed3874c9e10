"""Decoder blocks of up to 16 tokens in five launches each: queries, keys and values; attention; its
output; gate and up; down. Weights lie as the linears have them, so that larger steps may run the
modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.kernels.backend import (
    AttentionWeights,
    BlockSettings,
    BlockStep,
    BlockWeights,
    PreparedLinear,
    RunBlocks,
)
from quantkit.kernels.triton_attention import attend_to_cache, attention_counters
from quantkit.kernels.triton_projections import (
    ACTIVATIONS,
    MAX_TOKENS,
    apply_norm_weights,
    project_and_add,
    project_and_gate,
)
from quantkit.kernels.triton_qkv import project_qkv
from quantkit.tensors.cached_rows import CachedRows

FEATURES = frozenset(
    {
        "qkv_bias",
        "output_bias",
        "mlp_bias",
        "qk_norm",
        "clip_qkv",
        "window",
        "rotary",
        "query_scaling_beta",
        "attention_scale",
        "attention_softcap",
        "sinks",
        "residual_multiplier",
        "activation",
        "activation_limit",
        "activation_alpha",
    }
)
"""What they serve, see `BlockKernel`; of norms of queries and keys those of each head."""

_DTYPES = (torch.bfloat16, torch.float16)
# Supported head sizes are multiples of `_HEADS`, up to `_MAX_HEAD`.
_HEADS = 16
_MAX_HEAD = 256

_Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, int]


class _Norm(NamedTuple):
    """A norm's weights, float32 [D], divided by a power of two, so that none is above 1: nothing
    that they are multiplied by grows beyond float16.
    """

    weight: Tensor
    growth: float


class _Block:
    """A block's operands, and its five launches; `next_norm` is the input norm of the next
    block.
    """

    def __init__(
        self, weights: BlockWeights, settings: BlockSettings, norm: _Norm, next_norm: _Norm
    ) -> None:
        attention = weights.mixer
        assert isinstance(attention, AttentionWeights) and weights.down is not None
        self._settings = settings
        self._norm = norm
        self._next_norm = next_norm
        self._mlp_norm = _norm(weights.mlp_norm)
        self._qkv = _operands(attention.qkv[0])
        self._out = _operands(attention.out)
        self._gate_up = _operands(weights.gate_up[0])
        self._down = _operands(weights.down)
        self._head_norms: Tensor | None = None
        if attention.q_norm is not None and attention.k_norm is not None:
            # [2, Dh]
            self._head_norms = torch.stack([attention.q_norm, attention.k_norm])
        self._sinks = attention.sinks
        heads = settings.num_heads, settings.num_kv_heads
        self._arrived = attention_counters(MAX_TOKENS, *heads, norm.weight.device)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that the kernels read or count in."""
        for value in vars(self).values():
            # Norms and the operands of linears are tuples of tensors and numbers.
            if isinstance(value, tuple):
                operands = value
            else:
                operands = (value,)
            for operand in operands:
                if isinstance(operand, Tensor):
                    yield operand

    def run(
        self,
        number: int,
        states: Tensor,
        weighted: Tensor,
        squares: Tensor,
        step: BlockStep,
        batch: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the five launches; return hidden states [M, D], these weighted for the next block,
        and their sums of squares.
        """
        assert step.cached is not None
        settings = self._settings
        places = (step.positions, step.slots)
        keys, values = step.cached[number]
        assert isinstance(keys, CachedRows) and isinstance(values, CachedRows)
        turn: tuple[Tensor | None, Tensor | None] = (None, None)
        if settings.rotary:
            turn = step.angles[number]
        queries = project_qkv(
            weighted,
            squares,
            *self._qkv,
            settings.norm_eps,
            self._norm.growth,
            self._head_norms,
            settings.clip_qkv or 0.0,
            *turn,
            step.query_scales[number],
            *places,
            batch,
            *keys,
            *values,
        )
        mixed = attend_to_cache(
            queries,
            *keys,
            *values,
            *places,
            settings.window,
            settings.attention_scale,
            settings.attention_softcap,
            self._sinks,
            self._arrived,
            None,
        )
        mixed = mixed.flatten(0, 1)
        after = (self._mlp_norm.weight, settings.residual_multiplier)
        states, weighted, squares = project_and_add(mixed, states, *self._out, *after)
        inner = project_and_gate(
            weighted,
            squares,
            *self._gate_up,
            settings.norm_eps,
            self._mlp_norm.growth,
            ACTIVATIONS.index(settings.activation),
            settings.activation_limit or 0.0,
            settings.activation_alpha,
        )
        after = (self._next_norm.weight, settings.residual_multiplier)
        result: tuple[Tensor, Tensor, Tensor] = project_and_add(inner, states, *self._down, *after)
        return result


def prepare_blocks(
    layers: Sequence[tuple[BlockWeights, BlockSettings]], dtype: torch.dtype
) -> RunBlocks | None:
    """Prepare blocks, see `BlockKernel`; the linears' tensors are those of
    `TritonBackend.prepare`.
    """
    if dtype not in _DTYPES:
        return None
    for weights, settings in layers:
        if not _serves(weights, settings):
            return None
    # Tensors made in inference mode, the counters among them, could not be changed outside of it.
    with torch.inference_mode(False), torch.no_grad():
        norms = [_norm(weights.input_norm) for weights, _ in layers]
        # Nothing reads what the last block weighs for the next one; it needs some norm.
        following = [*norms[1:], norms[0]]
        blocks = []
        for layer, *pair in zip(layers, norms, following, strict=True):
            blocks.append(_Block(*layer, *pair))
    if norms[0].weight.is_cuda:
        # Blocks share norms: each tensor is marked once.
        tensors: dict[int, Tensor] = {}
        for block in blocks:
            for tensor in block.tensors():
                tensors[id(tensor)] = tensor
        for tensor in tensors.values():
            # Else each recorded step would copy it.
            torch._dynamo.mark_static_address(tensor, guard=False)

    def run(x: Tensor, step: BlockStep) -> Tensor:
        states = x.flatten(0, 1).contiguous()
        weighted, squares = apply_norm_weights(states, norms[0].weight)
        for number, block in enumerate(blocks):
            states, weighted, squares = block.run(number, states, weighted, squares, step, len(x))
        return states.view(x.shape)

    return run


def _serves(weights: BlockWeights, settings: BlockSettings) -> bool:
    """Check that the kernels support a block."""
    size = settings.head_dim
    attention = weights.mixer
    if not isinstance(attention, AttentionWeights) or weights.experts is not None:
        return False
    linears = (*attention.qkv, attention.out, *weights.gate_up, weights.down)
    # Four, if those that share an input are fused; none of floats.
    if len(linears) != 4 or any(linear is None or linear.scheme is None for linear in linears):
        return False
    if weights.mixer_output_norm is not None or weights.mlp_output_norm is not None:
        return False
    if weights.input_norm is None or weights.mlp_norm is None:
        return False
    if size % _HEADS != 0 or size > _MAX_HEAD:
        return False
    # A norm over all heads needs the sums of squares of several programs.
    return attention.q_norm is None or len(attention.q_norm) == size


def _operands(linear: PreparedLinear) -> _Operands:
    """List words, scales, zero points, bias, counters and group of a linear."""
    prepared = linear.prepared
    assert linear.scheme is not None
    zero = prepared.get("zero")
    # For kernels, 0 stands for 8 bits with one scale a row.
    group = linear.scheme.group_size or 0
    return prepared["words"], prepared["scale"], zero, linear.bias, prepared["arrived"], group


def _norm(weight: Tensor | None) -> _Norm:
    assert weight is not None
    largest = float(weight.abs().max())
    # A power of two changes no digit of the weights.
    if 0 < largest < math.inf:
        growth = 2.0 ** math.ceil(math.log2(largest))
    else:
        growth = 1.0
    return _Norm(weight / growth, growth)
