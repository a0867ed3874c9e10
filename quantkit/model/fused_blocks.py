"""Decoder blocks through kernels that compute a whole block in one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.kernels.backend import BlockKernel
from quantkit.model.cache import KVCache
from quantkit.model.decoder import Block, Blocks, Decoder
from quantkit.model.feed_forward import MLP
from quantkit.model.linear import QuantLinear
from quantkit.model.norm import RMSNorm
from quantkit.model.rope import Angles

_LINEARS = 4  # of a block whose kernel is known


_OUTSIDE = frozenset({"embedding_multiplier", "logit_multiplier", "logit_softcap", "norm_offset", "window_rope"})
"""Features that blocks have no part in, or that their weights and angles already hold."""


def block_features(config: ModelConfig) -> frozenset[str]:
    """What blocks of a config do beyond the plainest. A feature that is new is one that no kernel serves until it
    says so."""
    scaled = {"query_scaling_beta"} if config.rope.query_scaling_beta is not None else set()
    return config.features - _OUTSIDE | scaled


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
        linears = [linear for linear in _fused_linears(block) if isinstance(linear, QuantLinear)]
        offered = [linear.backend.operations() for linear in linears]
        kernels = [operations.block for operations in offered if operations is not None]
        if len(kernels) < _LINEARS or None in kernels:
            return None
        kernel = kernels[0]
        layers.append(_weights(block, linears))
    if kernel is None or not block_features(config) <= kernel.features:
        return None
    run = kernel.run
    rest = [(config.num_heads, config.num_kv_heads, window or 0, config.norm_eps) for window in config.windows]

    def blocks(
        x: Tensor, positions: Tensor, angles: Angles, cache: KVCache | None,
        slots: Tensor | None = None, *, first: bool,
    ) -> Tensor:  # fmt: skip
        x = x.float()
        unrotated = torch.ones_like(angles.cosine), torch.zeros_like(angles.sine)
        for layer, weights in enumerate(layers):
            stored = (None, None) if cache is None else (cache.keys[layer], cache.values[layer])
            turned = angles.of(config.layers[layer]) if config.layers[layer].rotary else unrotated
            run(x, *turned, positions, slots, *stored, first or cache is None, *weights, *rest[layer])
        return x

    return blocks


def _fused_linears(block: Block) -> tuple[nn.Module | None, ...]:
    """The linears in the order of the data's flow, one for each site; None where a site's are not fused."""
    if not isinstance(block.mlp, MLP):
        return ()
    return block.self_attn.qkv_proj, block.self_attn.o_proj, block.mlp.gate_up_proj, block.mlp.down_proj


def _weights(block: Block, linears: list[QuantLinear]) -> tuple[Tensor | None, ...]:
    """A block's weights in the order in which the kernels take them."""
    qkv, out, gate_up, down = linears
    attention = block.self_attn
    return (
        _norm(block.input_layernorm), *_packed(qkv), _norm(attention.q_norm), _norm(attention.k_norm), *_packed(out),
        _norm(block.post_attention_layernorm), *_packed(gate_up), *_packed(down),
    )  # fmt: skip


def _packed(linear: QuantLinear) -> tuple[Tensor, Tensor | None]:
    return linear.get_buffer("packed"), None if linear.bias is None else linear.bias.detach().float()


def _norm(norm: nn.Module | None) -> Tensor | None:
    assert norm is None or isinstance(norm, RMSNorm)
    return None if norm is None else norm.weight.detach().float() + norm.offset
