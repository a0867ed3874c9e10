"""Root-mean-square norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm (1910.07467), computed in float32; `offset` is added to the weight, and
    `rounds_last` tells whether the product with the weight is in float32 too.
    """

    def __init__(
        self, size: int, eps: float, offset: float = 0.0, *, rounds_last: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset
        self.rounds_last = rounds_last or offset != 0

    def forward(self, x: Tensor) -> Tensor:
        squares = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).square()
        return self.normalize_by_mean_square(x, squares / x.shape[-1])

    def normalize_by_mean_square(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Normalize x [..., N], given the mean of its squares, [..., 1]."""
        normed = x.float() * torch.rsqrt(mean_square + self.eps)
        # Gemma and Nemotron H multiply in float32, Llama rounds first: transformers does the same.
        if self.rounds_last:
            return (normed * (self.weight.float() + self.offset)).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)


def rms_norm(config: ModelConfig, size: int | None = None) -> RMSNorm:
    """Make a norm of a model, over its hidden states, or over a given number of elements."""
    return RMSNorm(
        size or config.hidden_size,
        config.norm_eps,
        config.norm_offset,
        rounds_last=config.norm_rounds_last,
    )
