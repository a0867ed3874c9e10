"""Decoder blocks through kernels that compute a whole block in one call."""

from __future__ import annotations

from dataclasses import MISSING, fields

import torch
from torch import Tensor, nn

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.kernels.backend import BlockKernel
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Block, Blocks, Decoder, RMSNorm
from quantkit.model.linear import QuantLinear


def block_features(config: ModelConfig) -> frozenset[str]:
    """What blocks of a config do beyond the plainest: the fields of the config, and of its layers, that are not at
    their defaults. So a feature that is new is one that no kernel serves until it says so."""
    every: tuple[ModelConfig | LayerConfig, ...] = (config, *config.layers)
    return frozenset(
        field.name
        for settings in every
        for field in fields(settings)
        if field.default is not MISSING and getattr(settings, field.name) != field.default
    )


def fused_blocks(model: Decoder, count: int | None = None) -> Blocks | None:
    """A model's blocks, or the first `count`, in float32 throughout.

    None where a layer is not quantized throughout by a backend with such a kernel, or the kernel does not serve a
    feature of the model.
    """
    config = model.config
    kernel: BlockKernel | None = None
    layers = []
    for block in model.model.layers[:count]:
        assert isinstance(block, Block)
        linears = [linear for linear in block.fused_linears() if isinstance(linear, QuantLinear)]
        offered = [linear.backend.operations() for linear in linears]
        kernels = [operations.block for operations in offered if operations is not None]
        if len(kernels) < len(block.fused_linears()) or None in kernels:
            return None
        kernel = kernels[0]
        layers.append(_weights(block, linears))
    if kernel is None or not block_features(config) <= kernel.features:
        return None
    run = kernel.run
    heads = config.num_heads, config.num_kv_heads
    rest = [(*heads, window or 0, None, None, None, "silu", None, config.norm_eps, 1.0) for window in config.windows]
    rotary = [layer.rotary for layer in config.layers]

    def blocks(
        x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache | None,
        slots: Tensor | None = None, *, first: bool,
    ) -> Tensor:  # fmt: skip
        x = x.float()
        unrotated = angles if all(rotary) else (torch.ones_like(angles[0]), torch.zeros_like(angles[1]))
        for layer, weights in enumerate(layers):
            stored = (None, None) if cache is None else (cache.keys[layer], cache.values[layer])
            turned = angles if rotary[layer] else unrotated
            run(x, *turned, None, positions, slots, *stored, first or cache is None, *weights, *rest[layer])
        return x

    return blocks


def _weights(block: Block, linears: list[QuantLinear]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """A block's weights, of attention and of the feed-forward, in the order in which the kernels take them."""
    qkv, out, gate_up, down = linears
    own = block.self_attn
    attention = [
        _norm(block.input_layernorm), *_packed(qkv), _norm(own.q_norm), _norm(own.k_norm), None, *_packed(out), None,
    ]  # fmt: skip
    feed_forward = [_norm(block.post_attention_layernorm), *_packed(gate_up), *_packed(down), None]
    return attention, feed_forward


def _packed(linear: QuantLinear) -> tuple[Tensor, Tensor | None]:
    return linear.get_buffer("packed"), None if linear.bias is None else linear.bias.detach().float()


def _norm(norm: nn.Module | None) -> Tensor | None:
    assert norm is None or isinstance(norm, RMSNorm)
    return None if norm is None else norm.weight.detach().float()
