"""The decoder, from the model down to its blocks.

B batch, T new positions, D hidden size, H heads, K KV heads, Dh head size, F feed-forward size, V
vocabulary. Modules have the names of Hugging Face's tensors, so a checkpoint's canonical names are
also the names of the parameters. The config's features decide what a block computes; this file does
not depend on a family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.model.attention import (
    CachedAttention,
    attend_with_mask,
    make_cached_attention,
    make_causal_attention,
)
from quantkit.model.cache import KVCache
from quantkit.model.device import check_token_ids
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.layer_inputs import LayerInput, LayerInputs
from quantkit.model.linear import FloatLinear, float_linear
from quantkit.model.mixers import MIXERS, make_mixer
from quantkit.model.mixers.mixer import Mixer, Step, make_cached_scan
from quantkit.model.norms import hidden_norm
from quantkit.model.rope import Angles, Rotary, Rotations, compute_rotations
from quantkit.model.spans import list_spans


class BlockRunner(Protocol):
    """Run all blocks of a decoder in one call, see `fused_blocks`."""

    def serves(self, x: Tensor, cache: KVCache | None) -> bool:
        """Return whether hidden states [B, T, D] with this cache, or without one, are supported."""
        ...

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
        """Run all blocks on hidden states [B, T, D] at rising positions."""
        ...


@dataclass(frozen=True)
class DecoderOps:
    """The operations of a decoder that kernels may take over; by default they are torch's.

    Attributes:
        cached_attention: attention over a cache.
        float_linear: the product with a head whose weight is floats.
        blocks: runs all blocks in place of the modules, in the steps that it supports; None runs
            the modules.
        ragged: whether the attention is as fast for rows [N, 1] of any sequences, also several
            rows of one sequence, as for rectangles [B, T].
        rotations: the angles of rotary positions.
        final_norm: of hidden states that `blocks` returned; None runs the module.
        find_likeliest: greedy drawing; None is torch's, see `greedy.draw_greedily`.
        single_threaded: a context in which torch's operations use only the calling thread; for
            operations that are small compared with the kernels, such as drawing a token.
    """

    cached_attention: CachedAttention = attend_with_mask
    ragged: bool = False
    float_linear: FloatLinear = float_linear
    blocks: BlockRunner | None = None
    rotations: Rotations = compute_rotations
    final_norm: Callable[[Tensor], Tensor] | None = None
    find_likeliest: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    single_threaded: Callable[[], AbstractContextManager[None]] = nullcontext


class Decoder(nn.Module):
    """A causal language model. Code that loads a decoder may replace `ops` to install kernels.

    Positions are tensors and the cache is static, so no step depends on data: the whole forward can
    be compiled.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        # With tied embeddings, None uses the embedding's weight. If the embedding is quantized,
        # loading sets a head that shares its codes.
        self.lm_head: nn.Module | None = None
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)
        # The processes that share the model; loading replaces it.
        self.group: ProcessGroup = SINGLE
        self.ops = DecoderOps()

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def forward(
        self,
        tokens: Tensor | Sequence[int],
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Compute logits [..., T, V] for token ids [T] or [B, T].

        Args:
            positions: of the tokens, [T]; None is 0 to T - 1.
            cache: as for `hidden`.

        Raises:
            RequestError: if the tokens are no ids of the vocabulary; a tensor with positions is not
                checked.
        """
        # Engines pass a tensor and positions. Reading the ids from a GPU would wait for it in each
        # step, so these are not checked.
        if not isinstance(tokens, Tensor) or positions is None:
            tokens = check_token_ids(tokens, self.config.vocab_size).to(self.device)
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        if tokens.dim() == 1:
            return self.forward(tokens[None], positions, cache)[0]
        return self.head(self.hidden(tokens, positions, cache))

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        *,
        slots: Tensor | None = None,
        lengths: Tensor | None = None,
        is_prefill: bool = False,
    ) -> Tensor:
        """Compute hidden states [B, T, D] after the final norm, for tokens [B, T].

        Args:
            positions: rising in each sequence: [T], the same for all, or [B, T].
            cache: stores keys, values and states; the tokens continue what is stored of a
                sequence in its slot. Without a cache, attention sees only `tokens`, and states
                begin with zeros.
            slots: the sequences' places in the cache, [B]; None is all of them in order.
            lengths: for rotary positions, see `Rotary`.
            is_prefill: whether the cache has no earlier positions that the tokens should see.
        """
        x = self.model.embed(tokens)
        angles = self.rotary(positions, lengths, self.ops.rotations)
        blocks = self.ops.blocks
        if blocks is not None and blocks.serves(x, cache):
            x = blocks(x, positions, angles, cache, slots, is_prefill=is_prefill)
            if self.ops.final_norm is not None and not torch.compiler.is_compiling():
                return self.ops.final_norm(x)
        else:
            layer_inputs: Sequence[Tensor] = ()
            if self.model.layer_inputs is not None:
                layer_inputs = self.model.layer_inputs(tokens, x)
            spans = list_spans(self.config)
            attention = self.ops.cached_attention
            if cache is None:
                attend = make_causal_attention(positions, spans)
                step = Step(angles, attend, layer_inputs=layer_inputs)
            else:
                attend = make_cached_attention(
                    cache, positions, spans, attention, slots, is_prefill=is_prefill
                )
                scan = make_cached_scan(cache, positions, slots, is_prefill=is_prefill)
                step = Step(angles, attend, scan, layer_inputs)
            for block in self.model.layers:
                x = block(x, step)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of hidden states [..., D], in their dtype: float32 if kernels run
        complete blocks in float32, else the model's dtype.
        """
        if self.lm_head is None:
            logits = self.ops.float_linear(hidden, self.model.embed_tokens.weight)
        elif isinstance(self.lm_head, nn.Linear):
            logits = self.ops.float_linear(hidden, self.lm_head.weight)
        else:
            logits = self.lm_head(hidden)
        if self.config.logit_softcap is None or torch.compiler.is_compiling():
            return final_logits(logits, self.config)
        # The softcap is small compared with the kernels, so torch's threads are not worth waking.
        with self.ops.single_threaded():
            return final_logits(logits, self.config)


def final_logits(products: Tensor, config: ModelConfig) -> Tensor:
    """Apply multiplier and softcap to the products of hidden states with the head, [..., V]."""
    if config.logit_multiplier != 1:
        products = products * config.logit_multiplier
    if config.logit_softcap is not None:
        # The division makes a new tensor, so the operations in place do not change the input.
        products = (products / config.logit_softcap).tanh_().mul_(config.logit_softcap)
    return products


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = hidden_norm(config)
        self.layer_inputs = LayerInputs(config) if config.layer_inputs is not None else None
        self._multiplier = config.embedding_multiplier

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up and scale the first block's inputs [B, T, D] for tokens [B, T]."""
        return scale_embeddings(self.embed_tokens(tokens), self._multiplier)


def scale_embeddings(embeddings: Tensor, multiplier: float) -> Tensor:
    """Multiply embeddings by the model's multiplier, rounded to their dtype first as in Gemma."""
    if multiplier == 1:
        return embeddings
    # A step recorded as a CUDA graph must not copy a number to the GPU, so the rounded multiplier
    # becomes a Python number.
    if embeddings.is_cuda and not torch.compiler.is_compiling():
        return embeddings * torch.tensor(multiplier, dtype=embeddings.dtype).item()
    return embeddings * torch.tensor(multiplier, dtype=embeddings.dtype, device=embeddings.device)


class Block(nn.Module):
    """One decoder layer: two residual branches, a mixer and a feed-forward, in sequence or both on
    the same states, or one of them alone, with norms before them, after them or both.

    A branch has two halves: `inner` computes the inputs of its last linear, or of its experts;
    `finish` applies that module and adds the output to the hidden states. Quantization needs the
    inputs in between.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        features = config.layers[layer]
        self._layer = layer
        before = config.norms in ("before", "both")
        after = config.norms in ("after", "both")
        self.branches: list[str] = []
        self.input_layernorm = self.attention_output_layernorm = None
        self._mixer_name = ""
        if features.mixer != "none":
            self.branches.append("mixer")
            self.input_layernorm = hidden_norm(config) if before else None
            # Registered under its own name, which is part of the canonical names of its tensors.
            self._mixer_name = MIXERS[features.mixer].NAME
            self.add_module(self._mixer_name, make_mixer(config, layer))
            self.attention_output_layernorm = hidden_norm(config) if after else None
        self.is_parallel = config.parallel_branches
        self.post_attention_layernorm = self.mlp_output_layernorm = None
        self.mlp: MLP | Experts | None = None
        if features.feed_forward:
            self.branches.append("mlp")
            # Parallel branches share the first norm, and experts may have norms of their own.
            has_second = before and not self.is_parallel
            if features.experts and config.experts is not None:
                has_second = has_second and not config.experts.separate_norms
            self.post_attention_layernorm = hidden_norm(config) if has_second else None
            if features.experts:
                self.mlp = Experts(config, layer)
            else:
                self.mlp = MLP(config, config.intermediate_size_of(layer), bias=config.mlp_bias)
            self.mlp_output_layernorm = hidden_norm(config) if after else None
        self.layer_input = LayerInput(config) if config.layer_inputs is not None else None
        self.layer_scale = nn.Parameter(torch.empty(1)) if config.layer_scales else None
        self._multiplier = config.residual_multiplier

    @property
    def mixer(self) -> Mixer | None:
        """Return the mixer; None if the layer is only a feed-forward."""
        mixer = getattr(self, self._mixer_name, None)
        assert mixer is None or isinstance(mixer, Mixer)
        return mixer

    def module_of(self, branch: str) -> Mixer | MLP | Experts:
        """Return the module of one of the block's branches."""
        module = self.mixer if branch == "mixer" else self.mlp
        assert module is not None
        return module

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Run both branches on hidden states [B, T, D]."""
        mixed = x
        if "mixer" in self.branches:
            mixed = self.finish("mixer", x, self.inner("mixer", x, step))
        if "mlp" in self.branches:
            source = self.choose_feed_forward_input(x, mixed)
            mixed = self.finish("mlp", mixed, self.inner("mlp", source, step))
        return self.complete(mixed, step)

    def complete(self, x: Tensor, step: Step) -> Tensor:
        """Add what the layer's own inputs contribute to hidden states [B, T, D] after its branches,
        and scale them.
        """
        if self.layer_input is not None:
            x = x + self.layer_input(x, step.layer_inputs[self._layer])
        if self.layer_scale is not None:
            x = x * self.layer_scale
        return x

    def choose_feed_forward_input(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Choose the hidden states that the feed-forward reads: those before the mixer's branch,
        `x`, or those after it, `mixed`. Its output is always added to the latter.
        """
        return x if self.is_parallel else mixed

    def apply_norm(self, branch: str, x: Tensor) -> Tensor:
        """Compute the inputs [B, T, D] of a branch's first linears from hidden states [B, T, D]."""
        if branch == "mixer" or self.is_parallel:
            norm = self.input_layernorm
        else:
            norm = self.post_attention_layernorm
        if norm is None:
            return x
        normed: Tensor = norm(x)
        return normed

    def inner(self, branch: str, x: Tensor, step: Step) -> Tensor:
        """Compute the inputs of a branch's last linear, [B, T, I], or of its experts, [B, T, D],
        from hidden states [B, T, D].
        """
        states = self.apply_norm(branch, x)
        module = self.module_of(branch)
        if isinstance(module, Mixer):
            return module.inner(states, step)
        return module.inner(states)

    def finish(self, branch: str, x: Tensor, inner: Tensor) -> Tensor:
        """Add a branch's output to hidden states [B, T, D], given the result of `inner`."""
        return self.add(branch, x, self.module_of(branch).output(inner))

    def add(self, branch: str, x: Tensor, out: Tensor) -> Tensor:
        """Add the output [B, T, D] of a branch's last linear, or of its experts, to hidden states
        [B, T, D].
        """
        if branch == "mixer":
            norm = self.attention_output_layernorm
        else:
            norm = self.mlp_output_layernorm
        if norm is not None:
            out = norm(out)
        if self._multiplier == 1:
            return x + out
        return x + out * self._multiplier
