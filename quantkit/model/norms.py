"""Norms of hidden states, and of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm (1910.07467), computed in float32; `offset` is added to the weight, and
    `is_wide` tells whether the product with the weight is in float32 too.
    """

    def __init__(
        self, size: int, eps: float, offset: float = 0.0, *, is_wide: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset
        self.is_wide = is_wide or offset != 0

    def forward(self, x: Tensor) -> Tensor:
        squares = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).square()
        return self.normalize_by_mean_square(x, squares / x.shape[-1])

    def normalize_by_mean_square(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Normalize x [..., N], given the mean of its squares, [..., 1]."""
        normed = x.float() * torch.rsqrt(mean_square + self.eps)
        # Gemma and Nemotron H multiply in float32, Llama rounds first: transformers does the same.
        if self.is_wide:
            return (normed * (self.weight.float() + self.offset)).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)


class UnitNorm(nn.Module):
    """Root-mean-square norm without a weight, computed in float32."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class CenteredNorm(RMSNorm):
    """Layer norm without a bias (1607.06450), computed in float32: an RMS norm of the difference to
    the mean.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        centered = wide - wide.mean(-1, keepdim=True)
        normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
        # In float32, as Cohere's models do.
        return (normed * (self.weight.float() + self.offset)).to(x.dtype)


def rms_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """Make an RMS norm of a model, over its hidden states, or over a given number of elements."""
    return RMSNorm(
        size or config.hidden_size,
        config.norm_eps,
        config.norm_offset,
        is_wide=config.wide_norms,
    )


def hidden_norm(config: ModelConfig) -> RMSNorm:
    """Make a norm of a model's hidden states, centered if the model's are."""
    if config.centered_norms:
        return CenteredNorm(config.hidden_size, config.norm_eps, config.norm_offset)
    return rms_norm(config)
