"""The Llama-family decoder, in the architecture's terms.

B batch, T new positions, D hidden size, H heads, K KV heads, Dh head size, F feed-forward
size, V vocabulary. Modules are named as Hugging Face names
their tensors, so a checkpoint's canonical names are its state's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

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
    causal_attention_into,
    masked_attention,
)
from quantkit.model.cache import KVCache
from quantkit.model.product import Product, product
from quantkit.model.rope import Rotary, rotate


class Blocks(Protocol):
    """All blocks of a decoder."""

    def __call__(
        self, x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache | None, *, first: bool
    ) -> Tensor:
        """Hidden states [B, T, D] at rising positions [T], with their angles, to hidden states after all blocks, which
        may be float32 where the model is not; `cache` and `first` as for `Decoder.hidden`."""
        ...


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


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        query, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=config.qkv_bias)
        self.qkv_proj: nn.Module | None = None  # in the place of the three, once they are joined
        self.widths = [query, shared, shared]
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        out: Tensor = self.o_proj(self.mix(x, angles, attend))  # [B, T, D]
        return out

    def mix(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """What the output projection is applied to: values mixed by attention, [B, T, H * Dh]."""
        batch, length, _ = x.shape  # [B, T, D]
        heads = [part.view(batch, length, -1, self.head_dim) for part in self.project(x)]
        queries, keys, values = heads  # [B, T, H, Dh], twice [B, T, K, Dh]
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = rotate(queries.transpose(1, 2), *angles)  # [B, H, T, Dh]
        keys = rotate(keys.transpose(1, 2), *angles)  # [B, K, T, Dh]
        return attend(self.layer, queries, keys, values.transpose(1, 2))

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Queries [B, T, H * Dh], keys and values [B, T, K * Dh]."""
        if self.qkv_proj is not None:
            joint: Tensor = self.qkv_proj(x)
            return torch.split(joint, self.widths, dim=-1)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class MLP(nn.Module):
    """SwiGLU feed-forward (2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.gate_up_proj: nn.Module | None = None  # in the place of the two, once they are joined
        self.down_proj = nn.Linear(inner, size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate(x))  # [B, T, D]
        return out

    def gate(self, x: Tensor) -> Tensor:
        """What the down projection is applied to: the gated inner states, [B, T, F]."""
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return F.silu(gate).mul_(up)


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind its norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """A causal language model.

    `lookup` and `linear` (of the head) are how it attends over a cache and multiplies by floats,
    `blocks` does all blocks in place of the modules, and what is small beside them, as drawing a token, is
    best done within `alone()`; whoever loads it may put kernels there.

    Positions are tensors and the cache is static, so no step depends on data: the
    whole forward can be compiled.
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
        self.lookup: CachedAttention = masked_attention
        self.linear: Product = product
        self.blocks: Blocks | None = None
        self.alone: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, cache: KVCache | None = None, *, first: bool = False) -> Tensor:
        """Hidden states [B, T, D] after the final norm, for tokens [B, T] at positions [T].

        Args:
            cache: takes up keys and values; attention sees all positions stored so far.
                Without one it sees the given tokens only.
            first: nothing is stored yet that the tokens should see.
        """
        x = self.model.embed_tokens(tokens)
        angles = self.rotary(positions)
        if self.blocks is not None:
            x = self.blocks(x, positions, angles, cache, first=first)
        else:
            attend = self._attend(positions, cache, first=first)
            for block in self.model.layers:
                x = block(x, angles, attend)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def _attend(self, positions: Tensor, cache: KVCache | None, *, first: bool) -> Attend:
        windows = self.config.windows
        if cache is None:
            return causal_attention(positions, windows)
        if first:
            return causal_attention_into(cache, positions, windows)
        return cached_attention(cache, positions, windows, self.lookup)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D], in their dtype: float32 where kernels do whole blocks, else the
        model's."""
        if self.lm_head is None:
            return self.linear(hidden, self.model.embed_tokens.weight)
        if isinstance(self.lm_head, nn.Linear):
            return self.linear(hidden, self.lm_head.weight)
        logits: Tensor = self.lm_head(hidden)
        return logits

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, T, V] for tokens [B, T] at positions [T]."""
        return self.head(self.hidden(tokens, positions, cache))
