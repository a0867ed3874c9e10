"""A causal convolution of each channel over the latest tokens.

B batch, T new positions, C channels, K tokens that the convolution sees.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def convolve(x: Tensor, convolution: nn.Conv1d, earlier: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve inputs [B, T, C] of consecutive tokens.

    Args:
        convolution: contains the weight [C, 1, K], and a bias or none.
        earlier: the inputs of the K - 1 tokens before, float32 [B, K - 1, C]; None for zeros.

    Returns:
        The outputs [B, T, C], and the inputs of the latest K - 1 tokens, both float32.
    """
    count = x.shape[1]
    weight = convolution.weight.float().squeeze(1)
    num_earlier = weight.shape[1] - 1
    if earlier is None:
        earlier = torch.zeros(len(x), num_earlier, x.shape[2], device=x.device)
    tokens = torch.cat((earlier, x.float()), dim=1)
    # Summed token by token, in float32: a torch convolution would add up in an order that depends
    # on the number of tokens, so that chunks of a prompt would give other bits.
    out = tokens[:, :count] * weight[:, 0]
    for place in range(1, num_earlier + 1):
        out = out + tokens[:, place : place + count] * weight[:, place]
    if convolution.bias is not None:
        out = out + convolution.bias.float()
    return out, tokens[:, count:]
