"""Decoder blocks through kernels that do a whole block in one call."""

from __future__ import annotations

from torch import Tensor, nn

from quantkit.model.cache import KVCache
from quantkit.model.decoder import Block, Blocks, Decoder, RMSNorm
from quantkit.model.qlinear import QuantLinear


def fused_blocks(model: Decoder, count: int | None = None) -> Blocks | None:
    """A model's blocks, or the first `count`, in float32 throughout; None if a layer is not quantized by a
    backend that can do it."""
    layers = []
    for block in model.model.layers[:count]:
        assert isinstance(block, Block)
        linears = (block.self_attn.qkv_proj, block.self_attn.o_proj, block.mlp.gate_up_proj, block.mlp.down_proj)
        quantized = [linear for linear in linears if isinstance(linear, QuantLinear)]
        offered = [linear.backend.operations() for linear in quantized]
        kernels = [operations.block for operations in offered if operations is not None]
        if len(kernels) < len(linears) or None in kernels:
            return None
        layers.append(_weights(block, quantized))
    run, config = kernels[0], model.config
    assert run is not None
    rest = [(config.num_heads, config.num_kv_heads, window or 0, config.norm_eps) for window in config.windows]

    def blocks(
        x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache | None, *, first: bool
    ) -> Tensor:
        x = x.float()
        for layer, weights in enumerate(layers):
            stored = (None, None) if cache is None else (cache.keys[layer], cache.values[layer])
            run(x, *angles, positions, *stored, first or cache is None, *weights, *rest[layer])
        return x

    return blocks


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
    return None if norm is None else norm.weight.detach().float()
