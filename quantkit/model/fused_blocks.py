"""Decoder blocks through kernels that compute whole blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.kernels.backend import (
    BlockKernel,
    BlockSettings,
    BlockStep,
    BlockWeights,
    PreparedLinear,
    RoutedExperts,
    RunBlocks,
)
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Block, Decoder, RMSNorm
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.linear import QuantLinear
from quantkit.model.rope import Angles

_OUTSIDE = frozenset(
    {"embedding_multiplier", "logit_multiplier", "logit_softcap", "norm_offset", "window_rope"}
)
"""Features that blocks have no part in, or that their weights and angles already hold."""


def block_features(config: ModelConfig) -> frozenset[str]:
    """Return what blocks of a config do beyond the plainest. A feature that is new is one that no
    kernel serves until it says so.
    """
    if config.rope.query_scaling_beta is not None:
        inner = {"query_scaling_beta"}
    else:
        inner = set()
    if config.experts is not None and config.experts.score_correction:
        inner.add("score_correction")
    return config.features - _OUTSIDE | inner


@dataclass(frozen=True)
class FusedBlocks:
    """Blocks of a decoder in one call: `run` is what the kernel prepared, `layers` what the blocks
    do, by their numbers, and `dtype` that of hidden states.
    """

    kernel: BlockKernel
    run: RunBlocks
    layers: Mapping[int, LayerConfig]
    dtype: torch.dtype

    def serves(self, x: Tensor, cache: KVCache | None) -> bool:
        """Return whether they may be called for hidden states [B, T, D] and a cache, or for none;
        else the modules run.
        """
        limit = self.kernel.max_tokens
        tokens = x.shape[0] * x.shape[1]
        return (limit is None or tokens <= limit) and (
            cache is not None or not self.kernel.needs_cache
        )

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        angles: Angles,
        cache: KVCache | None,
        slots: Tensor | None = None,
        *,
        first: bool,
    ) -> Tensor:
        """Hidden states [B, T, D] at rising positions, with their angles, to hidden states after
        all blocks, which may be float32 where the model is not; `cache`, `slots` and `first` as for
        `Decoder.hidden`.
        """
        cached = None
        if cache is not None:
            cached = [(cache.keys[number], cache.values[number]) for number in self.layers]
        turned = [angles.of(layer) for layer in self.layers.values()]
        step = BlockStep(
            positions, slots, angles.query_scale, first or cache is None, turned, cached
        )
        return self.run(x.to(self.dtype), step)


def fuse_blocks(
    model: Decoder, layers: Mapping[int, LayerConfig] | None = None
) -> FusedBlocks | None:
    """Return a model's blocks through a kernel.

    None where a layer is not quantized throughout by a backend with such a kernel, or the kernel
    does not serve what the model does.

    Args:
        layers: by their numbers those to take, and what they do; None is all, as the config has
            them.
    """
    config = model.config
    if layers is None:
        layers = dict(enumerate(config.layers))
    else:
        layers = layers
    kernel: BlockKernel | None = None
    blocks = []
    for number, layer in layers.items():
        block = model.model.layers[number]
        assert isinstance(block, Block)
        linears = []
        for linear in _find_fused_linears(block):
            if isinstance(linear, QuantLinear):
                linears.append(linear)
        offered = [linear.backend.operations() for linear in linears]
        kernels = [operations.block for operations in offered if operations is not None]
        if len(kernels) < len(_find_fused_linears(block)) or None in kernels:
            return None
        if isinstance(block.mlp, Experts) and block.mlp.bank is None:
            return None
        if block.self_attn.as_cached is not None:
            return None
        kernel = kernels[0]
        blocks.append((_weights(block, linears), _settings(config, layer)))
    if kernel is None or not block_features(config) <= kernel.features:
        return None
    dtype = kernel.dtype or model.dtype
    run = kernel.prepare(blocks, dtype)
    if run is None:
        return None
    return FusedBlocks(kernel, run, layers, dtype)


def _find_fused_linears(block: Block) -> tuple[nn.Module | None, ...]:
    """Return the linears in the order of the data's flow, one for each site; None where a site's
    are not fused. Those of a mixture of experts are the shared ones'.
    """
    mlp = block.mlp if isinstance(block.mlp, MLP) else block.mlp.shared_experts
    attention = block.self_attn
    if mlp is None:
        return attention.qkv_proj, attention.o_proj
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def _weights(block: Block, linears: list[QuantLinear]) -> BlockWeights:
    qkv, out, *rest = (
        PreparedLinear(
            linear.backend_tensors,
            linear.scheme,
            None if linear.bias is None else linear.bias.detach(),
        )
        for linear in linears
    )
    gate_up, down = rest or (None, None)
    own = block.self_attn
    return BlockWeights(
        _norm(block.input_layernorm),
        qkv,
        _norm(own.q_norm),
        _norm(own.k_norm),
        _floats(own.sinks),
        out,
        _norm(block.attention_output_layernorm),
        _norm(block.post_attention_layernorm),
        gate_up,
        down,
        _norm(block.mlp_output_layernorm),
        _to_routed_experts(block.mlp) if isinstance(block.mlp, Experts) else None,
    )


def _to_routed_experts(experts: Experts) -> RoutedExperts:
    bank = experts.bank
    gate = experts.shared_expert_gate
    assert bank is not None
    return RoutedExperts(
        experts.gate.weight.detach(),
        _floats(experts.gate.bias),
        bank.gate_up,
        bank.down,
        None if gate is None else _floats(gate.weight),
        experts.config.per_token,
        experts.config.normalized,
    )


def _settings(config: ModelConfig, layer: LayerConfig) -> BlockSettings:
    return BlockSettings(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        layer.window,
        layer.rotary,
        config.attention_scale,
        config.attention_softcap,
        config.clip_qkv,
        config.activation,
        config.activation_limit,
        config.activation_alpha,
        config.norm_eps,
        config.residual_multiplier,
    )


def _floats(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    return values.detach().float()


def _norm(norm: nn.Module | None) -> Tensor | None:
    assert norm is None or isinstance(norm, RMSNorm)
    if norm is None:
        return None
    return norm.weight.detach().float() + norm.offset
