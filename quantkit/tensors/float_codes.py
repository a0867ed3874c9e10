"""Codes that are small floats, e2m1 and e4m3, and the scales with which they span a weight.

Rounding is to nearest, ties to even, as by torch's casts and compressed-tensors' `quantize`.
Sources: OCP Microscaling Formats 1.0 for MXFP4; compressed-tensors' `generate_gparam` and
`calculate_qparams` for NVFP4 and FP8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.tensors.float8 import E4M3_MAX, round_to_e4m3
from quantkit.tensors.scheme import TILE, Codes, QuantScheme, Scales

LARGEST = {Codes.E2M1: 6.0, Codes.E4M3: E4M3_MAX}
"""The largest value of a code."""
MAGNITUDE_BITS = {Codes.E2M1: 3, Codes.E4M3: 7}
"""The bits of a code without its sign, which is the next one."""
MIN_EXPONENT = -127
MAX_EXPONENT = 125
"""Of MXFP4's powers of two: e8m0's smallest, and the largest with which 6 is a float32."""
E4M3_SMALLEST = 1
E4M3_LARGEST = 126
"""The bits of the smallest and of the largest positive e4m3; numbers between them rise with
their bits.
"""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of e2m1's largest value, 6 = 1.5 * 2**2.
_E2M1_EXPONENT = 2
# One over it is a normal float32.
_MAX_OUTER = 2.0**126


def decode_values(codes: Tensor, kind: Codes) -> Tensor:
    """Decode codes to float32 numbers."""
    if kind is Codes.E4M3:
        return codes.view(torch.float8_e4m3fn).float()
    negative = [-value for value in _E2M1]
    table = torch.tensor([*_E2M1, *negative], device=codes.device)
    return table[codes.int()]


def round_to_code_values(numbers: Tensor, kind: Codes) -> Tensor:
    """Round to the nearest values of codes, float32; larger numbers become the largest value."""
    if kind is Codes.E4M3:
        return round_to_e4m3(numbers)
    size = numbers.abs()
    # The steps of e2m1 between 0 and 2, 2 and 4, 4 and 6.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded: Tensor = (numbers / step).round_().mul_(step).clamp_(-LARGEST[kind], LARGEST[kind])
    return rounded


def encode_values(numbers: Tensor, kind: Codes) -> Tensor:
    """Encode values that codes have as uint8; the sign of zeros is kept."""
    if kind is Codes.E4M3:
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    size = numbers.abs()
    # The position in `_E2M1`, by arithmetic instead of a search.
    index = torch.where(size <= 2, 2 * size, torch.where(size <= 4, size + 2, size + 1))
    sign = torch.signbit(numbers).to(torch.uint8) << MAGNITUDE_BITS[kind]
    return index.to(torch.uint8) | sign


def nearest(weight: Tensor, steps: Tensor, kind: Codes) -> Tensor:
    """Find the codes, uint8, nearest to float32 weights; zeros where a step is zero."""
    scaled = torch.where(steps == 0, 0.0, weight / steps)
    return encode_values(round_to_code_values(scaled, kind), kind)


def compute_gaps(codes: Tensor, kind: Codes) -> Tensor:
    """Compute how far the value of a code is from that of a neighbour, float32, so that an error
    is at most half of it.
    """
    size = decode_values(codes, kind).abs()
    if kind is Codes.E2M1:
        return torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # `frexp` returns mantissas from 0.5 on; e4m3 has three more bits, so its step is
    # 2 ** (exponent - 4), and 2 ** -9 for subnormal numbers.
    _, exponent = torch.frexp(size)
    step_exponent = torch.where(size == 0, -9, exponent - 4).clamp(min=-9)
    return torch.ldexp(torch.ones_like(size), step_exponent)


def spanning_scales(
    weight: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, outer: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute the scales [O, G] with which codes span the groups of a weight [O, I], and an outer
    scale [O, 1] if the scheme has one; 1 where a group is all zeros or too small to scale.

    Args:
        scale_dtype: of FP8's scales.
        outer: float32 [1], shared with other weights; None is the weight's.
    """
    rows, columns = weight.shape
    largest = weight.view(rows, scheme.groups(columns), -1).abs().amax(-1).float()
    if scheme.scales is Scales.POWERS:
        return _compute_powers(largest), None
    if scheme.scales is Scales.NESTED:
        if outer is None:
            outer = outer_scale(largest)
        # One for each row, so that slices of rows keep theirs.
        outer = outer.to(weight.device).expand(rows, 1).contiguous()
        return _float8(largest / LARGEST[Codes.E2M1] * outer, largest == 0), outer
    if scheme.scales is Scales.TILES:
        largest = _of_tiles(largest)
    stored = (largest / LARGEST[Codes.E4M3]).to(scale_dtype)
    return torch.where(stored > 0, stored, torch.ones_like(stored)), None


def outer_scale(weight: Tensor) -> Tensor:
    """Compute the float32 [1] that NVFP4's scales are divided by: it makes that of the largest
    weight the largest e4m3.
    """
    largest = weight.abs().amax().float()
    outer: Tensor = LARGEST[Codes.E4M3] * LARGEST[Codes.E2M1] / largest
    return torch.where(largest > 0, outer.clamp(max=_MAX_OUTER), torch.ones_like(outer)).reshape(1)


def neighbours(scale: Tensor, scheme: QuantScheme) -> list[Tensor]:
    """List scales [O, G] near those that span the groups, for a search: the two next powers of two,
    or some e4m3 numbers.
    """
    candidates: list[Tensor] = []
    if scheme.scales is Scales.POWERS:
        for factor in (2.0, 0.5):
            candidates.append((scale * factor).clamp(2.0**MIN_EXPONENT, 2.0**MAX_EXPONENT))
        return candidates
    bits = scale.to(torch.float8_e4m3fn).view(torch.uint8).int()
    # At +4, 4 spans most groups instead of 6.
    for distance in (-1, 1, -2, 2, -3, 3, -4, 4, 5):
        candidates.append(_of_bits(bits + distance))
    return candidates


def _of_bits(bits: Tensor) -> Tensor:
    """Convert bits to positive e4m3 numbers, in float16."""
    return bits.clamp(E4M3_SMALLEST, E4M3_LARGEST).to(torch.uint8).view(torch.float8_e4m3fn).half()


def _float8(steps: Tensor, zero: Tensor) -> Tensor:
    """Round each scale to the nearest e4m3, float16; 1 where all weights are zero, and never
    zero.
    """
    bits = steps.clamp(max=LARGEST[Codes.E4M3]).to(torch.float8_e4m3fn).view(torch.uint8).int()
    return torch.where(zero, 1.0, _of_bits(bits)).half()


def _compute_powers(largest: Tensor) -> Tensor:
    """Compute MXFP4's scales, float32: the exponent of the largest weight less that of 6."""
    # `frexp` returns mantissas from 0.5 on, so its exponents are larger by one.
    _, exponent = torch.frexp(largest)
    exponent = (exponent - 1 - _E2M1_EXPONENT).clamp(MIN_EXPONENT, MAX_EXPONENT)
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1.0)


def _of_tiles(largest: Tensor) -> Tensor:
    """Compute the largest of each tile for every row, of [O, G]; the last tile may have fewer
    rows.
    """
    rows = len(largest)
    padded = torch.nn.functional.pad(largest, (0, 0, 0, -rows % TILE))
    return torch.unflatten(padded, 0, (-1, TILE)).amax(1).repeat_interleave(TILE, 0)[:rows]
