"""The decoder, from the whole model down to its norms.

B batch, T new positions, D hidden size, H heads, K KV heads, Dh head size, F feed-forward size, V vocabulary.
Modules are named as Hugging Face names their tensors, so a checkpoint's canonical names are its state's. What a
block does follows from the config's features; nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.model.attention import (
    Attend,
    CachedAttention,
    cached_attention,
    causal_attention,
    masked_attention,
    prefill_attention,
)
from quantkit.model.cache import KVCache
from quantkit.model.linear import FloatLinear, float_linear
from quantkit.model.rope import Rotary, rotate

Tap = Callable[[str, Tensor], None]
"""Is told a site's name and the input [B, T, I] of the linears that share it, right before they are applied."""


def no_tap(site: str, x: Tensor) -> None:
    """The `Tap` that does nothing."""


@dataclass(frozen=True)
class Step:
    """What one pass through the decoder hands to every block.

    Attributes:
        angles: cosine and sine of the tokens' positions, float32 [T, Dh] or [B, T, Dh].
        attend: how each token attends to the others.
        tap: listens to the inputs of the linears; it may raise to end the pass there.
    """

    angles: tuple[Tensor, Tensor]
    attend: Attend
    tap: Tap = no_tap


class Blocks(Protocol):
    """All blocks of a decoder in one call."""

    def __call__(
        self, x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache | None,
        slots: Tensor | None = None, *, first: bool,
    ) -> Tensor:  # fmt: skip
        """Hidden states [B, T, D] at rising positions, with their angles, to hidden states after all blocks, which
        may be float32 where the model is not; `cache`, `slots` and `first` as for `Decoder.hidden`."""
        ...


@dataclass(frozen=True)
class DecoderOps:
    """The operations of a decoder that kernels may take over; by default they are torch's.

    Attributes:
        cached_attention: attention over a cache.
        float_linear: the product with a head whose weight is floats.
        blocks: all blocks, in place of the modules; None runs the modules.
        ragged: whether that attention takes rows [N, 1] of any sequences, several of one among them, as fast as
            rectangles [B, T].
        single_threaded: keeps torch's operations to the calling thread while in it; for what is small beside the
            kernels, such as drawing a token.
    """

    cached_attention: CachedAttention = masked_attention
    ragged: bool = False
    float_linear: FloatLinear = float_linear
    blocks: Blocks | None = None
    single_threaded: Callable[[], AbstractContextManager[None]] = nullcontext


class Decoder(nn.Module):
    """A causal language model.

    `ops` is the one seam for kernels: whoever loads a decoder may replace it.

    Positions are tensors and the cache is static, so no step depends on data: the whole forward can be compiled.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head: nn.Module | None = None
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.group: ProcessGroup = SINGLE  # the processes that share the model
        self.ops = DecoderOps()

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, T, V] for tokens [B, T] at positions [T]."""
        return self.head(self.hidden(tokens, positions, cache))

    def hidden(
        self, tokens: Tensor, positions: Tensor, cache: KVCache | None = None, *, slots: Tensor | None = None,
        lengths: Tensor | None = None, first: bool = False,
    ) -> Tensor:  # fmt: skip
        """Hidden states [B, T, D] after the final norm, for tokens [B, T].

        Args:
            positions: rising in each sequence: [T], the same for all, or [B, T].
            cache: stores keys and values; attention sees all positions stored so far in a sequence's slot.
                Without one it sees the given tokens only.
            slots: the sequences' places in the cache, [B]; None is all of them in order.
            lengths: for rotary positions, see `Rotary`.
            first: the cache holds nothing yet that the tokens should see.
        """
        x = self.model.embed_tokens(tokens)
        angles = self.rotary(positions, lengths)
        if self.ops.blocks is not None:
            x = self.ops.blocks(x, positions, angles, cache, slots, first=first)
        else:
            step = Step(angles, self._attend(positions, cache, slots, first=first))
            for block in self.model.layers:
                x = block(x, step)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def _attend(self, positions: Tensor, cache: KVCache | None, slots: Tensor | None, *, first: bool) -> Attend:
        windows = self.config.windows
        if cache is None:
            return causal_attention(positions, windows)
        if first:
            return prefill_attention(cache, positions, windows, slots)
        return cached_attention(cache, positions, windows, self.ops.cached_attention, slots)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D], in their dtype: float32 where kernels compute whole blocks, else
        the model's."""
        if self.lm_head is None:
            return self.ops.float_linear(hidden, self.model.embed_tokens.weight)
        if isinstance(self.lm_head, nn.Linear):
            return self.ops.float_linear(hidden, self.lm_head.weight)
        logits: Tensor = self.lm_head(hidden)
        return logits


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Block(nn.Module):
    """One decoder layer: residual branches one after the other, each behind its norm.

    A branch has two halves: `inner` leads up to its last linear, `finish` applies that and adds its output to the
    hidden states.
    """

    BRANCHES: ClassVar = ("attention", "mlp")

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Hidden states [B, T, D] to hidden states."""
        for branch in self.BRANCHES:
            x = self.finish(branch, x, self.inner(branch, x, step), step)
        return x

    def inner(self, branch: str, x: Tensor, step: Step) -> Tensor:
        """What a branch's last linear is applied to, [B, T, I], for hidden states [B, T, D]."""
        if branch == "attention":
            return self.self_attn.inner(self.input_layernorm(x), step)
        return self.mlp.inner(self.post_attention_layernorm(x), step)

    def finish(self, branch: str, x: Tensor, inner: Tensor, step: Step) -> Tensor:
        """Hidden states [B, T, D] with a branch's output added, given what `inner` returned for them."""
        return x + (self.self_attn if branch == "attention" else self.mlp).output(inner, step)

    def fused_linears(self) -> tuple[nn.Module | None, ...]:
        """The linears in the order of the data's flow, one for each site; None where a site's are not fused."""
        return self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj


class Attention(nn.Module):
    """Grouped-query attention, with or without rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = config.layers[layer].rotary
        self.head_dim = config.head_dim
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.qkv_proj: nn.Module | None = None  # takes the place of the three where they are fused
        self.widths = [query, kv, kv]
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def inner(self, x: Tensor, step: Step) -> Tensor:
        """Values mixed by attention, [B, T, H * Dh], of normed hidden states [B, T, D]."""
        step.tap("attention.in", x)
        batch, length, _ = x.shape
        heads = [part.view(batch, length, -1, self.head_dim) for part in self.project(x)]
        queries, keys, values = heads  # [B, T, H, Dh], twice [B, T, K, Dh]
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys, values = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if self.rotary:
            queries, keys = rotate(queries, *step.angles), rotate(keys, *step.angles)
        return step.attend(self.layer, queries, keys, values)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Queries [B, T, H * Dh], keys and values [B, T, K * Dh]."""
        if self.qkv_proj is not None:
            fused: Tensor = self.qkv_proj(x)
            return torch.split(fused, self.widths, dim=-1)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def output(self, mixed: Tensor, step: Step) -> Tensor:
        """What is added to the hidden states, [B, T, D]."""
        step.tap("attention.out", mixed)
        out: Tensor = self.o_proj(mixed)
        return out


class MLP(nn.Module):
    """SwiGLU feed-forward (2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.gate_up_proj: nn.Module | None = None  # takes the place of the two where they are fused
        self.down_proj = nn.Linear(inner, size, bias=config.mlp_bias)

    def inner(self, x: Tensor, step: Step) -> Tensor:
        """Gated inner states, [B, T, F], of normed hidden states [B, T, D]."""
        step.tap("mlp.in", x)
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return F.silu(gate).mul_(up)

    def output(self, gated: Tensor, step: Step) -> Tensor:
        """What is added to the hidden states, [B, T, D]."""
        step.tap("mlp.out", gated)
        out: Tensor = self.down_proj(gated)
        return out


class RMSNorm(nn.Module):
    """Root-mean-square norm (1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype).mul_(self.weight)
