"""Rounding to float8_e4m3fn in float32 arithmetic, which compilers support on every device; some
lack casts to float8.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
"""The largest finite value of float8_e4m3fn."""

_SMALLEST_NORMAL = 2.0**-6
# The step of subnormal numbers is 2**-9.
_SUBNORMALS_IN_ONE = 512.0
# Bits of float32's mantissa: e4m3 has three of 23.
_DROPPED = 20


def round_to_e4m3(x: Tensor) -> Tensor:
    """Round float32 values to the nearest of float8_e4m3fn, ties to even; those beyond its range
    to its largest, Inf too. NaN stays NaN.
    """
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    bits = x.contiguous().view(torch.int32)
    # One less than half a step, plus the last kept bit: ties are rounded up if that bit is odd.
    half = (1 << (_DROPPED - 1)) - 1 + ((bits >> _DROPPED) & 1)
    normal = ((bits + half) >> _DROPPED << _DROPPED).view(torch.float32)
    subnormal = (x * _SUBNORMALS_IN_ONE).round() / _SUBNORMALS_IN_ONE
    return torch.where(x.isnan(), x, torch.where(x.abs() < _SMALLEST_NORMAL, subnormal, normal))
