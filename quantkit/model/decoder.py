"""The decoder, from the model down to its norms.

B batch, T new positions, D hidden size, H heads, K KV heads, Dh head size, F feed-forward size, V
vocabulary. Modules have the names of Hugging Face's tensors, so a checkpoint's canonical names are
also the names of the parameters. The config's features decide what a block computes; this file does
not depend on a family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.model.attention import (
    Attend,
    CachedAttention,
    ScoreSettings,
    attend_with_mask,
    make_cached_attention,
    make_causal_attention,
)
from quantkit.model.cache import KVCache
from quantkit.model.device import check_token_ids
from quantkit.model.feed_forward import MLP, Experts
from quantkit.model.linear import FloatLinear, float_linear
from quantkit.model.rope import Angles, Rotary, Rotations, compute_rotations, rotate


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
class Step:
    """The inputs that all blocks share in one pass through the decoder: the angles of the tokens'
    positions, and attention.
    """

    angles: Angles
    attend: Attend


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
            cache: stores keys and values; attention sees all positions stored so far in a
                sequence's slot. Without a cache, attention sees only `tokens`.
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
            windows = self.config.windows
            attention = self.ops.cached_attention
            if cache is None:
                attend = make_causal_attention(positions, windows)
            else:
                attend = make_cached_attention(
                    cache, positions, windows, attention, slots, is_prefill=is_prefill
                )
            for block in self.model.layers:
                x = block(x, Step(angles, attend))
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
        self.norm = rms_norm(config)
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
    """One decoder layer: two residual branches in sequence, with norms before them, after them or
    both.

    A branch has two halves: `inner` computes the inputs of its last linear, or of its experts;
    `finish` applies that module and adds the output to the hidden states. Quantization needs the
    inputs in between.
    """

    BRANCHES: ClassVar = ("attention", "mlp")

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        before = config.norms in ("before", "both")
        after = config.norms in ("after", "both")
        self.input_layernorm = rms_norm(config) if before else None
        self.self_attn = Attention(config, layer)
        self.attention_output_layernorm = rms_norm(config) if after else None
        self.post_attention_layernorm = rms_norm(config) if before else None
        self.mlp: MLP | Experts
        if config.layers[layer].experts:
            self.mlp = Experts(config)
        else:
            self.mlp = MLP(config, config.intermediate_size, bias=config.mlp_bias)
        self.mlp_output_layernorm = rms_norm(config) if after else None
        self._multiplier = config.residual_multiplier

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Run both branches on hidden states [B, T, D]."""
        for branch in self.BRANCHES:
            x = self.finish(branch, x, self.inner(branch, x, step))
        return x

    def apply_norm(self, branch: str, x: Tensor) -> Tensor:
        """Compute the inputs [B, T, D] of a branch's first linears from hidden states [B, T, D]."""
        if branch == "attention":
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
        if branch == "attention":
            return self.self_attn.inner(states, step)
        return self.mlp.inner(states)

    def finish(self, branch: str, x: Tensor, inner: Tensor) -> Tensor:
        """Add a branch's output to hidden states [B, T, D], given the result of `inner`."""
        module = self.self_attn if branch == "attention" else self.mlp
        return self.add(branch, x, module.output(inner))

    def add(self, branch: str, x: Tensor, out: Tensor) -> Tensor:
        """Add the output [B, T, D] of a branch's last linear, or of its experts, to hidden states
        [B, T, D].
        """
        if branch == "attention":
            norm = self.attention_output_layernorm
        else:
            norm = self.mlp_output_layernorm
        if norm is not None:
            out = norm(out)
        if self._multiplier == 1:
            return x + out
        return x + out * self._multiplier


class Attention(nn.Module):
    """Grouped-query attention, with or without rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.config = config.layers[layer]
        self.head_dim = config.head_dim
        query = config.num_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        # Replaces the three above if loading fuses them: one product of many rows is faster than
        # several of few rows.
        self.qkv_proj: nn.Module | None = None
        self.widths = [query, kv, kv]
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.output_bias)
        self.norms_heads = config.qk_norm == "head"
        self.q_norm = self.k_norm = None
        # Replaces both norms if processes share the width, because the mean square is then a sum
        # over processes.
        self.shared_norms: nn.Module | None = None
        if config.qk_norm is not None:
            if self.norms_heads:
                query_size = key_size = config.head_dim
            else:
                query_size = query
                key_size = kv
            self.q_norm = rms_norm(config, query_size)
            self.k_norm = rms_norm(config, key_size)
        self.clip = config.clip_qkv
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        # Rounds keys and values [B, K, T, Dh] as a quantized cache does, or records their maxima.
        self.as_cached: nn.Module | None = None
        self._scale = config.attention_scale
        self._softcap = config.attention_softcap

    @property
    def scores(self) -> ScoreSettings:
        return ScoreSettings(self._scale, self._softcap, self.sinks)

    def inner(self, x: Tensor, step: Step) -> Tensor:
        """Mix values by attention, [B, T, H * Dh], for normed hidden states [B, T, D]."""
        if self.qkv_proj is None:
            parts: tuple[Tensor, ...] = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        else:
            parts = torch.split(self.qkv_proj(x), self.widths, dim=-1)
        # Norms over the width (OLMo 2) precede the split into heads, norms per head (Qwen 3)
        # follow it.
        if not self.norms_heads:
            parts = self._apply_qk_norm(*parts)
        if self.clip is not None:
            parts = tuple(part.clamp(-self.clip, self.clip) for part in parts)
        queries, keys, values = (part.view(*part.shape[:-1], -1, self.head_dim) for part in parts)
        if self.norms_heads:
            queries, keys, values = self._apply_qk_norm(queries, keys, values)
        queries = queries.transpose(1, 2)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        if self.config.rotary:
            turn = step.angles.of(self.config)
            queries = rotate(queries, *turn)
            keys = rotate(keys, *turn)
        if step.angles.query_scale is not None:
            scale = step.angles.query_scale.unsqueeze(-1)
            if scale.dim() == 3:
                # With one row of positions per sequence, the heads need a dimension.
                scale = scale.unsqueeze(1)
            queries = queries * scale.to(queries.dtype)
        if self.as_cached is not None:
            keys, values = self.as_cached(keys, values)
        return step.attend(self.layer, queries, keys, values, self.scores)

    def output(self, mixed: Tensor) -> Tensor:
        """Project mixed values to the branch's output, [B, T, D]."""
        out: Tensor = self.o_proj(mixed)
        return out

    def _apply_qk_norm(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        if self.q_norm is None or self.k_norm is None:
            return queries, keys, values
        if self.shared_norms is not None:
            return *self.shared_norms(queries, keys), values
        return self.q_norm(queries), self.k_norm(keys), values


class RMSNorm(nn.Module):
    """Root-mean-square norm (1910.07467), computed in float32; `offset` is added to the weight."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        squares = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).square()
        return self.normalize_by_mean_square(x, squares / x.shape[-1])

    def normalize_by_mean_square(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Normalize x [..., N], given the mean of its squares, [..., 1]."""
        normed = x.float() * torch.rsqrt(mean_square + self.eps)
        # Gemma multiplies in float32, Llama rounds first: transformers does the same.
        if self.offset:
            return (normed * (self.weight.float() + self.offset)).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)


def rms_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """Make a norm of a model, over its hidden states, or over a given number of elements."""
    return RMSNorm(size or config.hidden_size, config.norm_eps, config.norm_offset)
