"""Rotary position embedding with real numbers, in rotate-half layout.

Sources: RoFormer (2104.09864); linear and NTK-by-length scaling as in the Hugging Face configs
``linear`` and ``dynamic``; YaRN (2309.00071); LongRoPE (2402.13753); Llama 3.1's frequency scaling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.rope import RopeConfig


@dataclass(frozen=True)
class Angles:
    """By what the queries and keys of some tokens are turned.

    Attributes:
        cosine, sine: float32 [..., T, head_dim].
        windowed: the same for layers with a window where their rotary positions differ, or None.
        query_scale: what queries are multiplied by, float32 [..., T], or None.
    """

    cosine: Tensor
    sine: Tensor
    windowed: tuple[Tensor, Tensor] | None = None
    query_scale: Tensor | None = None

    def of(self, layer: LayerConfig) -> tuple[Tensor, Tensor]:
        """Cosine and sine for a layer that turns queries and keys."""
        if self.windowed is not None and layer.window is not None:
            return self.windowed
        return self.cosine, self.sine


class Rotary(nn.Module):
    """The angles of positions, of all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._rope = config.rope
        size = config.head_dim, config.max_context
        self.whole = Frequencies(config.rope, *size)
        if config.window_rope is None:
            self.windowed = None
        else:
            self.windowed = Frequencies(config.window_rope, *size)

    def forward(self, positions: Tensor, lengths: Tensor | None = None) -> Angles:
        """Return the angles of the positions [..., T] of sequences, of lengths as each token finds
        them, [..., T]; None is up to the last position of each.
        """
        if self.windowed is None:
            windowed = None
        else:
            windowed = self.windowed(positions, lengths)
        cosine, sine = self.whole(positions, lengths)
        beta = self._rope.query_scaling_beta
        context = self._rope.original_context
        if beta is None or context is None:
            return Angles(cosine, sine, windowed)
        return Angles(
            cosine,
            sine,
            windowed,
            1 + beta * torch.log(1 + torch.floor(positions.float() / context)),
        )


class Frequencies(nn.Module):
    """Cosines and sines of one kind of rotary positions; all scaling of the frequencies happens
    here.
    """

    inverse_frequencies: Tensor
    stretched: Tensor | None

    def __init__(self, rope: RopeConfig, head_dim: int, max_context: int) -> None:
        super().__init__()
        self._rope = rope
        self._dim = rope.rotary_dim or head_dim
        self._context = max_context
        self._attention_scale = _attention_scale(rope)
        # Pairs that do not turn.
        self._still = (head_dim - self._dim) // 2
        self.register_buffer(
            "inverse_frequencies", inverse_frequencies(rope, self._dim), persistent=False
        )
        if rope.long_factor is None:
            longer = None
        else:
            longer = _long_rope(rope, rope.long_factor, self._dim)
        self.register_buffer("stretched", longer, persistent=False)

    def forward(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32 [..., T, head_dim], for the positions [..., T]; see `Rotary`."""
        frequencies = self.inverse_frequencies
        if self._rope.type in ("dynamic", "longrope"):
            if lengths is None:
                lengths = positions.amax(-1, keepdim=True) + 1
            else:
                lengths = lengths
            frequencies = self._of_length(lengths)
        angles = positions.float().unsqueeze(-1) * frequencies  # [T, dim / 2]
        cosine = angles.cos() * self._attention_scale
        sine = angles.sin() * self._attention_scale
        if self._still:
            cosine = F.pad(cosine, (0, self._still), value=1.0)
            sine = F.pad(sine, (0, self._still))
        return torch.cat((cosine, cosine), dim=-1), torch.cat((sine, sine), dim=-1)

    def _of_length(self, lengths: Tensor) -> Tensor:
        """Return the frequencies for sequences of lengths [..., 1 or T]: [..., 1 or T, dim / 2]."""
        if self.stretched is not None:
            assert self._rope.original_context is not None
            longer = (lengths > self._rope.original_context).unsqueeze(-1)
            return torch.where(longer, self.stretched, self.inverse_frequencies)
        # Dynamic scaling: past the trained context the base grows with a sequence's length.
        length = lengths.clamp(min=self._context).float().unsqueeze(-1)
        stretch = self._rope.factor * length / self._context - (self._rope.factor - 1)
        # Powers of a column would be rounded by where a row lies among others: each row is raised
        # to all exponents.
        exponents = torch.arange(0, self._dim, 2, device=lengths.device, dtype=torch.float32) / (
            self._dim - 2
        )
        return self.inverse_frequencies / stretch**exponents


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x [B, H, T, head_dim] by the angles of its positions, [T, head_dim] or [B, T,
    head_dim], in float32.
    """
    if cosine.dim() == 3:
        cosine = cosine.unsqueeze(1)
        sine = sine.unsqueeze(1)
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [dim / 2] on the CPU, wherever
    modules are made.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    if rope.short_factor is not None:
        return _long_rope(rope, rope.short_factor, dim)
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
    # Rotations within the trained context.
    turns = rope.original_context * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """Interpolate dimensions that turn rarely within the trained context, keep the others."""
    assert rope.original_context

    def dimension(turns: float) -> float:
        ratio = rope.original_context / (turns * 2 * math.pi)  # type: ignore[operator]
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = dimension(rope.beta_fast or 32)
    high = dimension(rope.beta_slow or 1)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    # of an odd config the first may be the larger, as in transformers
    low = max(low, 0)
    high = min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _long_rope(rope: RopeConfig, factors: Sequence[float], dim: int) -> Tensor:
    """Return each pair of dimensions has its own factor, which divides its frequency."""
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)


def _attention_scale(rope: RopeConfig) -> float:
    """YaRN's and LongRoPE's temperature, folded into cosine and sine; 1 for other types."""
    if rope.type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type == "longrope":
        assert rope.original_context is not None
        if rope.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))

    def magnitude(weight: float) -> float:
        if rope.factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
