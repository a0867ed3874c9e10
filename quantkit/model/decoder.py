"""The Llama-family decoder, in the architecture's terms.

B batch, T new positions, S positions attended to, D hidden size, H heads, K KV heads,
Dh head size, F feed-forward size, V vocabulary. Modules are named as Hugging Face names
their tensors, so a checkpoint's canonical names are its state's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.config import ModelConfig
from quantkit.model.cache import KVCache
from quantkit.model.rope import Rotary, rotate


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
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        out: Tensor = self.o_proj(self.mix(x, positions, angles, mask, cache))  # [B, T, D]
        return out

    def mix(
        self, x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """What the output projection is applied to: values mixed by attention, [B, T, H * Dh].

        Without a mask each of the T positions sees those up to itself.
        """
        batch, length, _ = x.shape  # [B, T, D]
        queries = self.q_proj(x).view(batch, length, -1, self.head_dim)  # [B, T, H, Dh]
        keys = self.k_proj(x).view(batch, length, -1, self.head_dim)  # [B, T, K, Dh]
        values = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # [B, K, T, Dh]
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = rotate(queries.transpose(1, 2), *angles)  # [B, H, T, Dh]
        keys = rotate(keys.transpose(1, 2), *angles)  # [B, K, T, Dh]
        if cache is not None:
            keys, values = cache.update(self.layer, positions, keys, values)  # [B, K, S, Dh]
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class MLP(nn.Module):
    """SwiGLU feed-forward (2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate(x))  # [B, T, D]
        return out

    def gate(self, x: Tensor) -> Tensor:
        """What the down projection is applied to: the gated inner states, [B, T, F]."""
        inner: Tensor = F.silu(self.gate_proj(x)).mul_(self.up_proj(x))
        return inner


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind its norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.window = config.windows[layer]
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, angles, mask, cache)
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

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        """Hidden states [B, T, D] after the final norm, for tokens [B, T] at positions [T].

        With a cache, attention sees all positions stored so far; without one, the given
        tokens only.
        """
        x = self.model.embed_tokens(tokens)
        angles = self.rotary(positions)
        masks = {window: _mask(positions, window, cache) for window in set(self.config.windows)}
        for block in self.model.layers:
            x = block(x, positions, angles, masks[block.window], cache)  # type: ignore[index]
        return self.model.norm(x)  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight)
        logits: Tensor = self.lm_head(hidden)
        return logits

    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, T, V] for tokens [B, T] at positions [T]."""
        return self.head(self.hidden(tokens, positions, cache))


def own_mask(positions: Tensor, window: int | None) -> Tensor | None:
    """Which of the rising positions [T] each of them sees: bool [T, T], or None for all up to itself."""
    return None if window is None else causal_mask(positions, positions, window)


def _mask(positions: Tensor, window: int | None, cache: KVCache | None) -> Tensor | None:
    if cache is None:
        return own_mask(positions, window)
    return causal_mask(positions, torch.arange(cache.length, device=positions.device), window)


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions [S] each query position [T] sees: bool [T, S]."""
    distance = queries.unsqueeze(-1) - keys
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
