"""The interface of kernels for whole decoder blocks: the weights and settings of a block, and a step.

B batch, T new tokens, D hidden size, H heads, K KV heads, Dh head size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.tensors.cached_rows import CachedRows
from quantkit.tensors.scheme import QuantScheme


@dataclass(frozen=True)
class PreparedLinear:
    """A linear, or linears that share an input, fused.

    Attributes:
        prepared: the result of its backend's `prepare`.
        bias: [O] in the model's dtype, or None.
    """

    prepared: dict[str, Tensor]
    scheme: QuantScheme
    bias: Tensor | None


@dataclass(frozen=True)
class StackedLinear:
    """A linear of every expert of a layer.

    Attributes:
        prepared: the results of the backend's `prepare`, stacked [E, ...].
        rows: outputs of one.
        bias: [E, O] in float32, or None.
    """

    prepared: dict[str, Tensor]
    scheme: QuantScheme
    rows: int
    bias: Tensor | None


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that tokens are routed to.

    Attributes:
        router, router_bias: [E, D] in the model's dtype, and [E] in float32 or None.
        gate_up, down: of every expert.
        shared_gate: float32 [1, D], of the shared experts, or None.
        per_token: experts of a token.
        normalized: whether the weights of a token's experts are scaled to sum to 1.
    """

    router: Tensor
    router_bias: Tensor | None
    gate_up: StackedLinear
    down: StackedLinear
    shared_gate: Tensor | None
    per_token: int
    normalized: bool


@dataclass(frozen=True)
class BlockWeights:
    """The weights of a decoder block; None for those that it lacks. Norms are float32, with their offset.

    Attributes:
        input_norm, mlp_norm: before attention and the feed-forward; the others with "output" after them.
        qkv, gate_up: linears that share an input, as one.
        q_norm, k_norm: of queries and keys, of each head [Dh] or the whole width.
        sinks: float32 [H].
        gate_up, down: of the feed-forward, or of the shared experts.
    """

    input_norm: Tensor | None
    qkv: PreparedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    out: PreparedLinear
    attention_output_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: PreparedLinear | None
    down: PreparedLinear | None
    mlp_output_norm: Tensor | None
    experts: RoutedExperts | None


@dataclass(frozen=True)
class BlockSettings:
    """What a decoder block does; fields as of `ModelConfig` and `LayerConfig`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rotary: bool
    attention_scale: float | None
    attention_softcap: float | None
    clip_qkv: float | None
    activation: str
    activation_limit: float | None
    activation_alpha: float
    norm_eps: float
    residual_multiplier: float


@dataclass(frozen=True)
class BlockStep:
    """A step, as blocks receive it.

    Attributes:
        positions: rising in each sequence, [T] or [B, T].
        slots: of the sequences in the cache, [B]; None is 0, 1, 2, ...
        query_scale: factors of queries, float32 [T] or [B, T], or None.
        first: the tokens see nothing in the cache yet.
        angles: of each layer cosine and sine, float32 [T, Dh] or [B, T, Dh].
        cached: of each layer keys and values [slots, K, S, Dh], or None without a cache.
    """

    positions: Tensor
    slots: Tensor | None
    query_scale: Tensor | None
    first: bool
    angles: Sequence[tuple[Tensor, Tensor]]
    cached: Sequence[tuple[CachedRows, CachedRows]] | None


RunBlocks = Callable[[Tensor, BlockStep], Tensor]
"""Maps hidden states [B, T, D] to those after all blocks; it may reuse their memory."""


@dataclass(frozen=True)
class BlockKernel:
    """A kernel for whole decoder blocks.

    Attributes:
        prepare: converts the blocks of a model, once, at load, for hidden states of a dtype; returns None if it does
            not support one of them.
        features: what it supports besides RMS norms before both branches, rotary grouped-query attention and SwiGLU:
            names of fields of `ModelConfig`, `LayerConfig` and `RopeConfig` that may differ from their defaults.
            Models with other features run without it.
        dtype: of hidden states; None is the model's.
        max_tokens: largest supported B * T of a step; None is any number.
        needs_cache: it supports only steps over a cache.
    """

    prepare: Callable[[Sequence[tuple[BlockWeights, BlockSettings]], torch.dtype], RunBlocks | None]
    features: frozenset[str]
    dtype: torch.dtype | None = None
    max_tokens: int | None = None
    needs_cache: bool = False
