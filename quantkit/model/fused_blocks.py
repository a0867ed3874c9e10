"""Run decoder blocks with kernels that compute a complete block each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ExpertsConfig, LayerConfig, ModelConfig
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
from quantkit.model.decoder import Block, Decoder
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.linear import QuantLinear
from quantkit.model.mixers.attention import Attention
from quantkit.model.norms import RMSNorm
from quantkit.model.rope import Angles

_OUTSIDE = frozenset(
    {
        "embedding_multiplier",
        "logit_multiplier",
        "logit_softcap",
        "norm_offset",
        "wide_norms",
        "window_rope",
    }
)
"""Features outside the blocks, and those that a block's weights and angles already include."""


def block_features(config: ModelConfig) -> frozenset[str]:
    """List the features that a kernel must support to run a config's blocks. No kernel supports
    a new feature until it declares so.
    """
    # Features of nested configs, which `config.features` does not list.
    inner: set[str] = set()
    if config.rope.query_scaling_beta is not None:
        inner.add("query_scaling_beta")
    if config.experts is not None:
        # The fields that change the choice or the weights of experts, but `normalized`.
        for name in (
            "score_correction",
            "scores",
            "normalization_eps",
            "scaling",
            "separate_norms",
            "expert_scales",
            "weighted_inputs",
        ):
            if getattr(config.experts, name) != getattr(ExpertsConfig, name):
                inner.add(name)
    return config.features - _OUTSIDE | inner


@dataclass(frozen=True)
class FusedBlocks:
    """Blocks of a decoder that run in one call.

    Attributes:
        run: the function that the kernel prepared.
        layers: the configs of the blocks by their numbers.
        dtype: of hidden states.
        parameters: of the blocks.
    """

    kernel: BlockKernel
    run: RunBlocks
    layers: Mapping[int, LayerConfig]
    dtype: torch.dtype
    parameters: Sequence[nn.Parameter]

    def serves(self, x: Tensor, cache: KVCache | None) -> bool:
        """Return whether the kernel supports hidden states [B, T, D] with this cache, or without
        one; if not, the modules run.
        """
        if cache is None and self.kernel.needs_cache:
            return False
        # Kernels compute no gradients.
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in self.parameters):
            return False
        limit = self.kernel.max_tokens
        return limit is None or x.shape[0] * x.shape[1] <= limit

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        angles: Angles,
        cache: KVCache | None,
        slots: Tensor | None = None,
        *,
        is_prefill: bool,
    ) -> Tensor:
        """Run all blocks on hidden states [B, T, D] at rising positions, with their angles. The
        result may be float32 although the model has another dtype. `cache`, `slots` and
        `is_prefill` are those of `Decoder.hidden`.
        """
        cached = None
        if cache is not None:
            cached = []
            for number in self.layers:
                rows = cache.rows(number)
                cached.append((rows.keys, rows.values))
        turned = [angles.of(layer) for layer in self.layers.values()]
        step = BlockStep(
            positions=positions,
            slots=slots,
            query_scale=angles.query_scale,
            is_prefill=is_prefill or cache is None,
            angles=turned,
            cached=cached,
        )
        return self.run(x.to(self.dtype), step)


def fuse_blocks(
    model: Decoder,
    layers: Mapping[int, LayerConfig] | None = None,
    *,
    kernel: BlockKernel | None = None,
) -> FusedBlocks | None:
    """Prepare a model's blocks for a kernel: that of its quantized linears' backend.

    Returns None if a layer has another mixer than attention, or linears of another kind than
    quantized ones and floats, their backend has no such kernel, or the kernel does not support the
    model's features.

    Args:
        layers: configs of the layers to prepare, by their numbers; None is all layers of the
            model's config.
        kernel: for blocks whose linears are all floats.
    """
    config = model.config
    if layers is None:
        layers = dict(enumerate(config.layers))
    blocks: list[tuple[BlockWeights, BlockSettings]] = []
    for number, layer in layers.items():
        block = model.model.layers[number]
        assert isinstance(block, Block)
        if not isinstance(block.mixer, Attention):
            return None
        sites = _find_linears(block, block.mixer)
        for linear in itertools.chain(*sites):
            if isinstance(linear, QuantLinear):
                offered = linear.backend.offer_kernels()
                if offered is None or offered.block is None:
                    return None
                # Kernels for experts take one weight of each, also of the shared ones.
                if (
                    linear.joined
                    and isinstance(block.mlp, Experts)
                    and linear is not block.mixer.qkv_proj
                ):
                    return None
                kernel = offered.block
            # Not its subclasses and wrappers, which compute something else.
            elif type(linear) is not nn.Linear:
                return None
        # Experts run in the block through their bank.
        if isinstance(block.mlp, Experts) and block.mlp.bank is None:
            return None
        # Kernels do not round keys and values to a quantized cache's scales.
        if block.mixer.as_cached is not None:
            return None
        blocks.append((_collect_weights(block, block.mixer, sites), _settings(config, layer)))
    if kernel is None or not block_features(config) <= kernel.features:
        return None
    dtype = kernel.dtype or model.dtype
    run = kernel.prepare(blocks, dtype)
    if run is None:
        return None
    return FusedBlocks(
        kernel=kernel,
        run=run,
        layers=layers,
        dtype=dtype,
        parameters=list(model.model.layers.parameters()),
    )


def _find_linears(block: Block, attention: Attention) -> tuple[tuple[nn.Module, ...], ...]:
    """List the linears of a block by their sites, in the order of the data flow. Those of a site
    share an input, and are one if they are fused. For a mixture of experts, the last two sites are
    the shared experts', or are missing.
    """
    mlp: MLP | None
    if isinstance(block.mlp, MLP):
        mlp = block.mlp
    else:
        mlp = block.mlp.shared_experts
    qkv: tuple[nn.Module, ...]
    if attention.qkv_proj is not None:
        qkv = (attention.qkv_proj,)
    else:
        qkv = tuple(
            linear
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
            if linear is not None
        )
    if mlp is None:
        return qkv, (attention.o_proj,)
    gate_up: tuple[nn.Module, ...]
    if mlp.gate_up_proj is not None:
        gate_up = (mlp.gate_up_proj,)
    else:
        gate_up = (mlp.gate_proj, mlp.up_proj)
    return qkv, (attention.o_proj,), gate_up, (mlp.down_proj,)


def _prepare_linear(linear: nn.Module) -> PreparedLinear:
    assert isinstance(linear, (QuantLinear, nn.Linear))
    bias = None if linear.bias is None else linear.bias.detach()
    if isinstance(linear, QuantLinear):
        return PreparedLinear(linear.backend_tensors, linear.scheme, bias)
    return PreparedLinear({"weight": linear.weight.detach()}, None, bias)


def _collect_weights(
    block: Block, attention: Attention, sites: Sequence[Sequence[nn.Module]]
) -> BlockWeights:
    prepared: list[tuple[PreparedLinear, ...]] = []
    for linears in sites:
        prepared.append(tuple(_prepare_linear(linear) for linear in linears))
    qkv, (out,), *feed_forward = prepared
    gate_up: tuple[PreparedLinear, ...] = ()
    down = None
    if feed_forward:
        gate_up, (down,) = feed_forward
    return BlockWeights(
        input_norm=_norm(block.input_layernorm),
        qkv=qkv,
        q_norm=_norm(attention.q_norm),
        k_norm=_norm(attention.k_norm),
        sinks=_floats(attention.sinks),
        out=out,
        attention_output_norm=_norm(block.attention_output_layernorm),
        mlp_norm=_norm(block.post_attention_layernorm),
        gate_up=gate_up,
        down=down,
        mlp_output_norm=_norm(block.mlp_output_layernorm),
        experts=_to_routed_experts(block.mlp) if isinstance(block.mlp, Experts) else None,
    )


def _to_routed_experts(experts: Experts) -> RoutedExperts:
    bank = experts.bank
    gate = experts.shared_expert_gate
    assert bank is not None
    return RoutedExperts(
        router=experts.gate.weight.detach(),
        router_bias=_floats(experts.gate.bias),
        gate_up=bank.gate_up,
        down=bank.down,
        shared_gate=None if gate is None else _floats(gate.weight),
        per_token=experts.config.per_token,
        normalized=experts.config.normalized,
    )


def _settings(config: ModelConfig, layer: LayerConfig) -> BlockSettings:
    return BlockSettings(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=layer.window,
        rotary=layer.rotary,
        attention_scale=config.attention_scale,
        attention_softcap=config.attention_softcap,
        clip_qkv=config.clip_qkv,
        activation=config.activation,
        activation_limit=config.activation_limit,
        activation_alpha=config.activation_alpha,
        norm_eps=config.norm_eps,
        residual_multiplier=config.residual_multiplier,
    )


def _floats(values: Tensor | None) -> Tensor | None:
    if values is None:
        return None
    return values.detach().float()


def _norm(norm: nn.Module | None) -> Tensor | None:
    assert norm is None or isinstance(norm, RMSNorm)
    if norm is None:
        return None
    # Kernels know no offset, so the weight includes it.
    return norm.weight.detach().float() + norm.offset
