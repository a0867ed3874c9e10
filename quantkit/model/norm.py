"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm (1910.07467), computed in float32.

    Attributes:
        offset: what is added to the weight.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).square() / x.shape[-1])

    def scaled(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Normed values of x [..., N], given the mean of their squares, [..., 1]."""
        normed = x.float() * torch.rsqrt(mean_square + self.eps)
        if self.offset:
            return (normed * (self.weight.float() + self.offset)).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)


def rms_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """A norm of a model, over its hidden states, or over a given number of elements."""
    return RMSNorm(size or config.hidden_size, config.norm_eps, config.norm_offset)
