"""Decoder blocks through kernels that compute a whole block in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.kernels.backend import BlockKernel
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Block, Blocks, Decoder
from quantkit.model.expert_bank import ExpertBank
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.linear import QuantLinear
from quantkit.model.norm import RMSNorm
from quantkit.model.rope import Angles

_OUTSIDE = frozenset({"embedding_multiplier", "logit_multiplier", "logit_softcap", "norm_offset", "window_rope"})
"""Features that blocks have no part in, or that their weights and angles already hold."""


def block_features(config: ModelConfig) -> frozenset[str]:
    """What blocks of a config do beyond the plainest. A feature that is new is one that no kernel serves until it
    says so."""
    inner = {"query_scaling_beta"} if config.rope.query_scaling_beta is not None else set()
    if config.experts is not None and config.experts.score_correction:
        inner.add("score_correction")
    return config.features - _OUTSIDE | inner


def fused_blocks(model: Decoder, layers: Mapping[int, LayerConfig] | None = None) -> Blocks | None:
    """A model's blocks, in float32 throughout.

    None where a layer is not quantized throughout by a backend with such a kernel, or the kernel does not serve a
    feature of the model.

    Args:
        layers: by their numbers those to take, and what they do; None is all, as the config has them.
    """
    config = model.config
    layers = dict(enumerate(config.layers)) if layers is None else layers
    kernel: BlockKernel | None = None
    operands = {}
    for number, layer in layers.items():
        block = model.model.layers[number]
        assert isinstance(block, Block)
        linears = [linear for linear in _fused_linears(block) if isinstance(linear, QuantLinear)]
        offered = [linear.backend.operations() for linear in linears]
        kernels = [operations.block for operations in offered if operations is not None]
        if len(kernels) < len(_fused_linears(block)) or None in kernels:
            return None
        if isinstance(block.mlp, Experts) and not isinstance(block.mlp.bank, ExpertBank):
            return None
        kernel = kernels[0]
        operands[number] = *_weights(block, linears), *_settings(config, block, layer)
    if kernel is None or not block_features(config) <= kernel.features:
        return None
    run, rotary = kernel.run, all(layer.rotary for layer in layers.values())

    def blocks(
        x: Tensor, positions: Tensor, angles: Angles, cache: KVCache | None,
        slots: Tensor | None = None, *, first: bool,
    ) -> Tensor:  # fmt: skip
        x = x.float()
        unrotated = () if rotary else (torch.ones_like(angles.cosine), torch.zeros_like(angles.sine))
        for number, layer in layers.items():
            stored = (None,) * 4 if cache is None else (*cache.keys[number], *cache.values[number])
            turned = angles.of(layer) if layer.rotary else unrotated
            among = angles.query_scale, positions, slots, *stored, first or cache is None
            run(x, *turned, *among, *operands[number])
        return x

    return blocks


def _fused_linears(block: Block) -> tuple[nn.Module | None, ...]:
    """The linears in the order of the data's flow, one for each site; None where a site's are not fused. Those of a
    mixture of experts are the shared ones'."""
    mlp = block.mlp if isinstance(block.mlp, MLP) else block.mlp.shared_experts
    feed_forward = () if mlp is None else (mlp.gate_up_proj, mlp.down_proj)
    return block.self_attn.qkv_proj, block.self_attn.o_proj, *feed_forward


def _weights(block: Block, linears: list[QuantLinear]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """A block's weights, of attention and of the feed-forward, in the order in which the kernels take them."""
    qkv, out, *rest = linears
    own = block.self_attn
    attention = [
        _norm(block.input_layernorm), *_packed(qkv), _norm(own.q_norm), _norm(own.k_norm), _floats(own.sinks),
        *_packed(out), _norm(block.attention_output_layernorm),
    ]  # fmt: skip
    inside = [tensor for linear in rest for tensor in _packed(linear)]
    if isinstance(block.mlp, Experts):
        inside = [*_routed(block.mlp), *(inside or [None] * 4), _gate(block.mlp)]
    return attention, [_norm(block.post_attention_layernorm), *inside, _norm(block.mlp_output_layernorm)]


def _routed(experts: Experts) -> list[Tensor | None]:
    """The router and the bank."""
    bank = experts.bank
    assert isinstance(bank, ExpertBank)
    return [
        experts.gate.weight.detach(), _floats(experts.gate.bias),
        bank.gate_up.prepared["packed"], bank.gate_up.bias, bank.down.prepared["packed"], bank.down.bias,
    ]  # fmt: skip


def _gate(experts: Experts) -> Tensor | None:
    """The weight [1, D] of the shared experts' gate."""
    return None if experts.shared_expert_gate is None else _floats(experts.shared_expert_gate.weight)


def _settings(config: ModelConfig, block: Block, layer: LayerConfig) -> tuple[Any, ...]:
    """What a block of such a layer does, in the order in which the kernels take it."""
    experts = config.experts if isinstance(block.mlp, Experts) else None
    return (
        config.num_heads, config.num_kv_heads, layer.window or 0, config.attention_scale, config.attention_softcap,
        config.clip_qkv, config.activation, config.activation_limit, config.norm_eps, config.residual_multiplier,
        *((experts.per_token, experts.normalized) if experts else ()),
    )  # fmt: skip


def _packed(linear: QuantLinear) -> tuple[Tensor, Tensor | None]:
    return linear.get_buffer("packed"), _floats(linear.bias)


def _floats(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.detach().float()


def _norm(norm: nn.Module | None) -> Tensor | None:
    assert norm is None or isinstance(norm, RMSNorm)
    return None if norm is None else norm.weight.detach().float() + norm.offset
