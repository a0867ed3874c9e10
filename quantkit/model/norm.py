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
        wide = x.float()
        mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        normed = wide * torch.rsqrt(mean + self.eps)
        if self.offset:
            return (normed * (self.weight.float() + self.offset)).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)


def rms_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """A norm of a model, over its hidden states or so many numbers."""
    return RMSNorm(size or config.hidden_size, config.norm_eps, config.norm_offset)
