"""Run decoder blocks with kernels that compute a complete block each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ExpertsConfig, LayerConfig, ModelConfig
from quantkit.kernels.backend import (
    AttentionWeights,
    BlockKernel,
    BlockSettings,
    BlockStep,
    BlockWeights,
    GatedDeltaWeights,
    Mamba2Weights,
    MixerWeights,
    PreparedLinear,
    RoutedExperts,
    RunBlocks,
    ShortConvWeights,
)
from quantkit.model.cache import KeysAndValues, KVCache
from quantkit.model.decoder import Block, Decoder
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.linear import QuantLinear
from quantkit.model.mixers.attention import Attention
from quantkit.model.mixers.mixer import Mixer
from quantkit.model.norms import RMSNorm
from quantkit.model.rope import Angles
from quantkit.tensors.cached_rows import CachedRows

if TYPE_CHECKING:
    from quantkit.model.mixers.gated_delta import GatedDelta
    from quantkit.model.mixers.mamba2 import Mamba2
    from quantkit.model.mixers.short_conv import ShortConv

_CHOICES = (
    "score_correction",
    "float32_router",
    "scores",
    "normalization_eps",
    "scaling",
    "latent_size",
    "separate_norms",
    "expert_scales",
    "weighted_inputs",
)
"""The fields of a mixture that change the choice, the weights or the inputs of experts, except
`normalized`, which kernels support.
"""
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
        for name in _CHOICES:
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
        cached: list[tuple[CachedRows, CachedRows] | tuple[Tensor, ...]] | None = None
        if cache is not None:
            cached = []
            for number in self.layers:
                layer = cache.layers[number]
                if isinstance(layer, KeysAndValues):
                    cached.append((layer.keys, layer.values))
                else:
                    cached.append(tuple(layer.tensors()))
        turned = [angles.of(layer) for layer in self.layers.values()]
        query_scales = [angles.query_scale_of(layer) for layer in self.layers.values()]
        step = BlockStep(
            positions=positions,
            slots=slots,
            query_scales=query_scales,
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

    Returns None if a layer has a mixer that no kernel knows, or linears of another kind than
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
        mixer_sites = _find_mixer_linears(block.mixer)
        if mixer_sites is None:
            return None
        mlp_sites = _find_feed_forward_linears(block.mlp)
        latents = _find_latent_linears(block.mlp)
        for linear in itertools.chain(*mixer_sites, *mlp_sites, latents):
            if isinstance(linear, QuantLinear):
                offered = linear.backend.offer_kernels()
                if offered is None or offered.block is None:
                    return None
                # Kernels for experts take one weight of each, also of the shared ones.
                is_of_experts = isinstance(block.mlp, Experts) and (linear,) in mlp_sites
                if linear.joined and is_of_experts:
                    return None
                kernel = offered.block
            # Not its subclasses and wrappers, which compute something else.
            elif type(linear) is not nn.Linear:
                return None
        # Experts run in the block through their bank.
        if isinstance(block.mlp, Experts) and block.mlp.bank is None:
            return None
        # Kernels do not round keys and values to a quantized cache's scales.
        if isinstance(block.mixer, Attention) and block.mixer.as_cached is not None:
            return None
        weights = _collect_weights(block, mixer_sites, mlp_sites)
        blocks.append((weights, _settings(config, layer)))
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


_Sites = tuple[()] | tuple[tuple[nn.Module, ...], tuple[nn.Module]]
"""The linears that read the input of one half of a block, which are one if they are fused, and the
last one; nothing for a half without linears of its own.
"""


def _find_feed_forward_linears(mlp: MLP | Experts | None) -> _Sites:
    """List the linears of a feed-forward, or, for a mixture of experts, of its shared experts."""
    if isinstance(mlp, Experts):
        mlp = mlp.shared_experts
    if mlp is None:
        return ()
    if mlp.gate_up_proj is not None:
        return (mlp.gate_up_proj,), (mlp.down_proj,)
    if mlp.gate_proj is not None:
        return (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)
    return (mlp.up_proj,), (mlp.down_proj,)


def _find_latent_linears(mlp: MLP | Experts | None) -> list[nn.Module]:
    """List the linears around experts that see latent states."""
    if not isinstance(mlp, Experts) or mlp.latent_in_proj is None:
        return []
    assert mlp.latent_out_proj is not None
    return [mlp.latent_in_proj, mlp.latent_out_proj]


def _find_mixer_linears(mixer: Mixer | None) -> _Sites | None:
    """List the linears of a mixer; None if no kernel knows it."""
    if mixer is None:
        return ()
    if isinstance(mixer, Attention):
        if mixer.qkv_proj is not None:
            return (mixer.qkv_proj,), (mixer.o_proj,)
        if mixer.k_proj is None or mixer.v_proj is None:
            # Of other layers, or the keys.
            return None
        return (mixer.q_proj, mixer.k_proj, mixer.v_proj), (mixer.o_proj,)
    # By name, so that only the mixers of the model are imported.
    kind = mixer.config.mixer
    if kind in ("short_conv", "mamba2"):
        of_one_input = cast("ShortConv | Mamba2", mixer)
        return (of_one_input.in_proj,), (of_one_input.out_proj,)
    if kind == "gated_delta":
        rule = cast("GatedDelta", mixer)
        if rule.delta.joined:
            return (rule.in_proj_qkvz, rule.in_proj_ba), (rule.out_proj,)
        inputs = rule.in_proj_qkv, rule.in_proj_z, rule.in_proj_b, rule.in_proj_a
        return inputs, (rule.out_proj,)
    return None


def _prepare_linear(linear: nn.Module) -> PreparedLinear:
    assert isinstance(linear, (QuantLinear, nn.Linear))
    bias = None if linear.bias is None else linear.bias.detach()
    if isinstance(linear, QuantLinear):
        return PreparedLinear(linear.backend_tensors, linear.scheme, bias)
    return PreparedLinear({"weight": linear.weight.detach()}, None, bias)


def _prepare_sites(sites: _Sites) -> tuple[tuple[PreparedLinear, ...], PreparedLinear | None]:
    """Prepare the first linears of one half of a block, and the last one."""
    if not sites:
        return (), None
    inputs, (out,) = sites
    return tuple(_prepare_linear(linear) for linear in inputs), _prepare_linear(out)


def _collect_weights(block: Block, mixer_sites: _Sites, mlp_sites: _Sites) -> BlockWeights:
    inputs, out = _prepare_sites(mixer_sites)
    gate_up, down = _prepare_sites(mlp_sites)
    mixer: MixerWeights | None = None
    if block.mixer is not None:
        assert out is not None
        mixer = _collect_mixer_weights(block.mixer, inputs, out)
    mlp_norm = block.input_layernorm if block.is_parallel else block.post_attention_layernorm
    return BlockWeights(
        input_norm=_norm(block.input_layernorm),
        mixer=mixer,
        mixer_output_norm=_norm(block.attention_output_layernorm),
        mlp_norm=_norm(mlp_norm),
        gate_up=gate_up,
        down=down,
        mlp_output_norm=_norm(block.mlp_output_layernorm),
        experts=_to_routed_experts(block.mlp) if isinstance(block.mlp, Experts) else None,
    )


def _collect_mixer_weights(
    mixer: Mixer, inputs: tuple[PreparedLinear, ...], out: PreparedLinear
) -> MixerWeights:
    """Collect what a kernel needs of a mixer in addition to its linears."""
    kind = mixer.config.mixer
    if kind == "short_conv":
        return _collect_short_conv(cast("ShortConv", mixer), inputs[0], out)
    if kind == "gated_delta":
        return _collect_gated_delta(cast("GatedDelta", mixer), inputs, out)
    if kind == "mamba2":
        return _collect_mamba2(cast("Mamba2", mixer), inputs[0], out)
    assert isinstance(mixer, Attention)
    q_norm = _norm(mixer.q_norm)
    k_norm = _norm(mixer.k_norm)
    if mixer.bare_norm is not None:
        # Kernels multiply by weights.
        (*_, weight) = out.prepared.values()
        q_norm = k_norm = torch.ones(mixer.head_dim, device=weight.device)
    return AttentionWeights(
        qkv=inputs,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=_floats(mixer.sinks),
        out=out,
    )


def _collect_short_conv(
    mixer: ShortConv, inputs: PreparedLinear, out: PreparedLinear
) -> ShortConvWeights:
    weight = _to_convolution(mixer.conv)
    return ShortConvWeights(inputs, weight, _floats(mixer.conv.bias), out)


def _collect_gated_delta(
    mixer: GatedDelta, inputs: tuple[PreparedLinear, ...], out: PreparedLinear
) -> GatedDeltaWeights:
    return GatedDeltaWeights(
        inputs=inputs,
        convolution=_to_convolution(mixer.conv1d),
        rate_bias=mixer.dt_bias.detach().float(),
        decay=-mixer.A_log.detach().float().exp(),
        norm=mixer.norm.weight.detach().float(),
        out=out,
        key_heads=mixer.delta.key_heads,
        value_heads=mixer.delta.value_heads,
    )


def _collect_mamba2(mixer: Mamba2, inputs: PreparedLinear, out: PreparedLinear) -> Mamba2Weights:
    return Mamba2Weights(
        inputs=inputs,
        convolution=_to_convolution(mixer.conv1d),
        convolution_bias=_floats(mixer.conv1d.bias),
        step_bias=mixer.dt_bias.detach().float(),
        decay=-mixer.A_log.detach().float().exp(),
        skip=mixer.D.detach().float(),
        step_limits=torch.tensor(mixer.mamba.step_limits, dtype=torch.float32),
        norm=mixer.norm.weight.detach().float(),
        out=out,
        heads=mixer.mamba.heads,
        groups=mixer.mamba.groups,
    )


def _to_convolution(convolution: nn.Conv1d) -> Tensor:
    """Transpose the weight of a convolution of each channel, [C, 1, K], to [K, C]."""
    return convolution.weight.detach().float().squeeze(1).t().contiguous()


def _to_routed_experts(experts: Experts) -> RoutedExperts:
    bank = experts.bank
    config = experts.config
    gate = experts.shared_expert_gate
    latent_in = experts.latent_in_proj
    latent_out = experts.latent_out_proj
    assert bank is not None
    return RoutedExperts(
        router=experts.gate.weight.detach(),
        router_bias=_floats(experts.gate.bias),
        score_correction=_floats(experts.score_correction),
        gate_up=bank.gate_up,
        down=bank.down,
        latent_in=None if latent_in is None else _prepare_linear(latent_in),
        latent_out=None if latent_out is None else _prepare_linear(latent_out),
        shared_gate=None if gate is None else _floats(gate.weight),
        per_token=config.per_token,
        scores=config.scores,
        normalized=config.normalized,
        normalization_eps=config.normalization_eps,
        scaling=config.scaling,
        weighted_inputs=config.weighted_inputs,
    )


def _settings(config: ModelConfig, layer: LayerConfig) -> BlockSettings:
    return BlockSettings(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=layer.window,
        chunk=layer.chunk,
        rotary=layer.rotary,
        attention_scale=config.attention_scale,
        attention_softcap=config.attention_softcap,
        clip_qkv=config.clip_qkv,
        attention_gate=config.attention_gate,
        qk_norm_after_rotary=config.qk_norm_after_rotary,
        activation=config.activation,
        activation_limit=config.activation_limit,
        activation_alpha=config.activation_alpha,
        norm_eps=config.norm_eps,
        centered_norms=config.centered_norms,
        residual_multiplier=config.residual_multiplier,
        parallel_branches=config.parallel_branches,
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
