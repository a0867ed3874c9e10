"""Rotary position embedding with real numbers, in rotate-half layout.

Sources: RoFormer (2104.09864); linear and NTK-by-length scaling as in the Hugging Face
configs ``linear`` and ``dynamic``; YaRN (2309.00071); Llama 3.1's frequency scaling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.rope import RopeConfig


class Rotary(nn.Module):
    """Cosines and sines for positions; all scaling of the frequencies happens here."""

    inverse_frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._rope = config.rope
        self._dim = config.head_dim
        self._context = config.max_context
        self._attention_scale = _attention_scale(config.rope)
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32 [..., T, head_dim], for the positions [..., T] of sequences.

        Args:
            lengths: of the sequences as each token finds them, [..., T]; None is up to the last position of each.
        """
        frequencies = self.inverse_frequencies
        if self._rope.type == "dynamic":
            frequencies = self._stretched(positions.amax(-1, keepdim=True) + 1 if lengths is None else lengths)
        angles = positions.float().unsqueeze(-1) * frequencies  # [T, head_dim / 2]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self._attention_scale, angles.sin() * self._attention_scale

    def _stretched(self, lengths: Tensor) -> Tensor:
        """Dynamic scaling: past the trained context the base grows with a sequence's length."""
        length = lengths.clamp(min=self._context).float().unsqueeze(-1)
        stretch = self._rope.factor * length / self._context - (self._rope.factor - 1)
        # Powers of a column would be rounded by where a row lies among others: each row is raised to all exponents.
        exponents = torch.arange(0, self._dim, 2, device=lengths.device, dtype=torch.float32) / (self._dim - 2)
        return self.inverse_frequencies / stretch**exponents


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x [B, H, T, head_dim] by the angles of its positions, [T, head_dim] or [B, T, head_dim], in float32."""
    if cosine.dim() == 3:
        cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [dim / 2] on the CPU, wherever modules are made."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, plain)
    if rope.type == "yarn":
        return _yarn(rope, plain, dim)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow down long waves by the factor, keep short ones, blend between."""
    assert rope.original_context and rope.low_freq_factor and rope.high_freq_factor
    turns = rope.original_context * plain / (2 * math.pi)  # rotations within the trained context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """Interpolate dimensions that turn rarely within the trained context, keep the others."""
    assert rope.original_context

    def dimension(turns: float) -> float:
        ratio = rope.original_context / (turns * 2 * math.pi)  # type: ignore[operator]
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)  # of an odd config the first may be the larger, as in transformers
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _attention_scale(rope: RopeConfig) -> float:
    """YaRN's temperature, folded into cosine and sine; 1 for other types."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
