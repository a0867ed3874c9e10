"""Rotary position embedding with real numbers, in rotate-half layout.

Sources: RoFormer (2104.09864); linear and NTK-by-length scaling as in the Hugging Face configs
``linear`` and ``dynamic``; YaRN (2309.00071); LongRoPE (2402.13753); Llama 3.1's frequency scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.config import LayerConfig, ModelConfig
from quantkit.architectures.rope import RopeConfig

# In place of a width of zero between two frequencies.
_NO_WIDTH = 1e-30


@dataclass(frozen=True)
class Angles:
    """The rotations of the queries and keys of some tokens.

    Attributes:
        cosine, sine: float32 [..., T, head_dim], or of the rotated dimensions if these come first.
        windowed: cosine and sine of layers with a window, if their rotary positions differ, or
            None.
        query_scale: a factor of queries, float32 [..., T], or None.
        unrotated_query_scale: the same of layers without rotary positions, if it is not that of
            the others.
    """

    cosine: Tensor
    sine: Tensor
    windowed: tuple[Tensor, Tensor] | None = None
    query_scale: Tensor | None = None
    unrotated_query_scale: Tensor | None = None

    def query_scale_of(self, layer: LayerConfig) -> Tensor | None:
        """Select the factor of a layer's queries."""
        if self.unrotated_query_scale is not None and not layer.rotary:
            return self.unrotated_query_scale
        return self.query_scale

    def of(self, layer: LayerConfig) -> tuple[Tensor, Tensor]:
        """Select cosine and sine for a layer with rotary positions."""
        if self.windowed is not None and layer.window is not None:
            return self.windowed
        return self.cosine, self.sine


Rotations = Callable[[Tensor, Tensor, float, int], tuple[Tensor, Tensor]]
"""Computes what `compute_rotations` does, with its arguments in their order."""


class Rotary(nn.Module):
    """Computes the angles of positions for all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._rope = config.rope
        self._query_scale = config.query_scale
        self.whole = _make_frequencies(config, config.rope, config.full_head_dim or config.head_dim)
        if config.window_rope is None:
            self.windowed = None
        else:
            self.windowed = _make_frequencies(config, config.window_rope, config.head_dim)

    def forward(
        self,
        positions: Tensor,
        lengths: Tensor | None = None,
        compute: Rotations | None = None,
    ) -> Angles:
        """Compute the angles of positions [..., T].

        Args:
            lengths: of the sequence as of each token, [..., T]; None takes the last position of
                each sequence plus one.
            compute: takes the place of `compute_rotations`.
        """
        compute = compute or compute_rotations
        if self.windowed is None:
            windowed = None
        else:
            windowed = self.windowed(positions, lengths, compute)
        cosine, sine = self.whole(positions, lengths, compute)
        unrotated: Tensor | None = None
        if self._query_scale is not None:
            floors = torch.floor((positions.float() + 1) / self._query_scale.floor)
            unrotated = 1 + self._query_scale.strength * torch.log1p(floors)
        beta = self._rope.query_scaling_beta
        context = self._rope.original_context
        query_scale: Tensor | None = None
        if beta is not None and context is not None:
            # As Llama 4's, it grows at each multiple of the original context.
            query_scale = 1 + beta * torch.log(1 + torch.floor(positions.float() / context))
        return Angles(cosine, sine, windowed, query_scale, unrotated)


def _make_frequencies(config: ModelConfig, rope: RopeConfig, head_dim: int) -> Frequencies:
    # Then only the rotated dimensions have angles, see `rotate`.
    if config.leading_rotary and rope.rotary_dim is not None:
        head_dim = rope.rotary_dim
    return Frequencies(rope, head_dim, config.max_context)


class Frequencies(nn.Module):
    """Computes cosines and sines of one kind of rotary positions, with all frequency scaling."""

    inverse_frequencies: Tensor
    stretched: Tensor | None

    def __init__(self, rope: RopeConfig, head_dim: int, max_context: int) -> None:
        super().__init__()
        self._rope = rope
        self._head_dim = head_dim
        self._dim = rope.rotary_dim or head_dim
        self._context = max_context
        self._attention_scale = _attention_scale(rope)
        self.register_buffer(
            "inverse_frequencies",
            inverse_frequencies(rope, self._dim, head_dim),
            persistent=False,
        )
        if rope.long_factor is None:
            longer = None
        else:
            # Only LongRoPE has two sets of frequencies.
            longer = _long_rope(rope, rope.long_factor, self._dim)
        self.register_buffer("stretched", longer, persistent=False)

    def forward(
        self, positions: Tensor, lengths: Tensor | None, compute: Rotations
    ) -> tuple[Tensor, Tensor]:
        """Compute cosine and sine, float32 [..., T, head_dim], for positions [..., T]; see
        `Rotary`.
        """
        frequencies = self.inverse_frequencies
        if self._rope.type in ("dynamic", "longrope"):
            if lengths is None:
                lengths = positions.amax(-1, keepdim=True) + 1
            frequencies = self._of_length(lengths)
        return compute(positions, frequencies, self._attention_scale, self._head_dim)

    def _of_length(self, lengths: Tensor) -> Tensor:
        """Compute frequencies [..., 1 or T, dim / 2] for sequences of lengths [..., 1 or T]."""
        if self.stretched is not None:
            assert self._rope.original_context is not None
            longer = (lengths > self._rope.original_context).unsqueeze(-1)
            return torch.where(longer, self.stretched, self.inverse_frequencies)
        # Dynamic scaling: past the trained context the base grows with a sequence's length.
        length = lengths.clamp(min=self._context).float().unsqueeze(-1)
        stretch = self._rope.factor * length / self._context - (self._rope.factor - 1)
        # Each row is raised to all exponents. Powers of a column have bits that depend on the row's
        # index, so a sequence's result would depend on its place in the batch.
        pairs = torch.arange(0, self._dim, 2, device=lengths.device, dtype=torch.float32)
        exponents = pairs / (self._dim - 2)
        return self.inverse_frequencies / stretch**exponents


def compute_rotations(
    positions: Tensor, frequencies: Tensor, scale: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine times `scale`, float32 [..., T, head_dim], for positions [..., T].

    Args:
        frequencies: the angle per position of each pair of dimensions, float32 [P], or
            [..., 1 or T, P] if they differ between tokens; P is at most head_dim / 2, and further
            pairs are not rotated.
    """
    # [..., T, P]. Positions as float32 are exact up to 2**24.
    angles = positions.float().unsqueeze(-1) * frequencies
    turns = _cosine_and_sine(angles)
    cosine = turns[0] * scale
    sine = turns[1] * scale
    # Pairs that are not rotated, with partial rotary embedding.
    num_still = head_dim // 2 - frequencies.shape[-1]
    if num_still:
        # An angle of zero.
        cosine = F.pad(cosine, (0, num_still), value=1.0)
        sine = F.pad(sine, (0, num_still))
    return torch.cat((cosine, cosine), dim=-1), torch.cat((sine, sine), dim=-1)


def _cosine_and_sine(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Compute both of float32 angles, each of their shape."""
    if angles.device.type == "cpu" and not torch.compiler.is_compiling():
        # For cosines of as few as 128 values, MKL wakes a thread on each processor, which then
        # spins while the kernels need it. Complex numbers are made without MKL.
        values = torch.polar(torch.ones_like(angles), angles)
        return values.real, values.imag
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x [B, H, T, head_dim] by the angles of its positions, [T, R] or [B, T, R], in float32.
    If R is less than head_dim, only the first R dimensions are rotated.
    """
    rotated = cosine.shape[-1]
    if rotated < x.shape[-1]:
        turned = rotate(x[..., :rotated], cosine, sine)
        return torch.cat((turned, x[..., rotated:]), dim=-1)
    if cosine.dim() == 3:
        # A dimension for heads.
        cosine = cosine.unsqueeze(1)
        sine = sine.unsqueeze(1)
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, dim: int, head_dim: int) -> Tensor:
    """Compute the angle per position of each pair of dimensions, float32 [dim / 2] on the CPU.

    The device is explicit because modules are made on the meta device.

    Args:
        dim: the number of rotated dimensions of a head.
        head_dim: its size.
    """
    if rope.type == "proportional":
        pairs = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu")
        return 1.0 / rope.theta ** (pairs / head_dim) / rope.factor
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    # Up to the original context, LongRoPE uses its short factors.
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
    """Divide low frequencies by the factor, keep high ones, and blend between them."""
    assert rope.original_context and rope.low_freq_factor and rope.high_freq_factor
    # Rotations within the trained context.
    turns = rope.original_context * plain / (2 * math.pi)
    width = rope.high_freq_factor - rope.low_freq_factor
    # Without a width there is nothing to blend: each frequency is divided or kept.
    blend = (turns - rope.low_freq_factor) / (width or _NO_WIDTH)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """Divide the frequencies of dimensions that rotate rarely within the trained context, and keep
    the others.
    """
    assert rope.original_context

    def dimension(turns: float) -> float:
        # The dimension that makes this number of turns within the trained context (2309.00071).
        ratio = rope.original_context / (turns * 2 * math.pi)  # type: ignore[operator]
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    # 32 and 1 are the paper's values for Llama.
    low = dimension(rope.beta_fast or 32)
    high = dimension(rope.beta_slow or 1)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    # With an unusual config, low may be larger than high; transformers does the same.
    low = max(low, 0)
    high = min(high, dim - 1)
    # 0.001 avoids a division by zero, as in transformers.
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _long_rope(rope: RopeConfig, factors: Sequence[float], dim: int) -> Tensor:
    """Divide the frequency of each pair of dimensions by its own factor."""
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * powers)


def _attention_scale(rope: RopeConfig) -> float:
    """Compute the attention temperature of YaRN and LongRoPE, 1 for other types; cosine and sine
    are multiplied by it.
    """
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
        # The paper's fit: sqrt(1 / t) = 0.1 ln(s) + 1. DeepSeek added the weight.
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
