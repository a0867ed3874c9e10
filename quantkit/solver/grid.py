"""Scales and zero points by search: of many steps per group, the one of least weighted error."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.scheme import QuantScheme

_STEPS = 52  # of 0.0125, so that 1 is among them
_LARGEST, _SMALLEST = 1.05, 0.40


def search_scales(
    weight: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each group that minimize ``sum(importance * error ** 2)``.

    Tried are steps from 1.05 down to 0.40 times the one that spans the group. Symmetric
    codes reach one step further down than up, so symmetric scales may be negative: the
    longer side then serves the larger weights.

    Args:
        weight: [O, I] float32.
        importance: [I] float32, not negative: the diagonal of the layer's Hessian.
        scheme: the group size must divide I.
        scale_dtype: dtype the scales are stored in; errors are those of stored scales.

    Returns:
        Scale [O, G] in `scale_dtype`, and zero point [O, G] uint8 if the scheme has one.
    """
    rows, columns = weight.shape
    groups = scheme.groups(columns)
    grouped = weight.view(rows, groups, -1)
    weights = importance.view(groups, -1)
    top = scheme.levels - 1
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    span = torch.maximum(-low, high) / (top / 2) if scheme.symmetric else (high - low) / top
    best = torch.full_like(span, torch.inf)
    scale = torch.ones_like(span, dtype=scale_dtype)
    zero = torch.full_like(span, scheme.levels // 2)
    for step in range(_STEPS + 1):
        factor = _LARGEST + (_SMALLEST - _LARGEST) * step / _STEPS
        for sign in (1, -1) if scheme.symmetric else (1,):
            stored = (span * (factor * sign)).to(scale_dtype)
            wide = stored.float()
            offset = zero if scheme.symmetric else (-low * factor / wide).round_().clamp_(0, top)
            codes = (grouped / wide.unsqueeze(-1)).round_().add_(offset.unsqueeze(-1)).clamp_(0, top)
            error = codes.sub_(offset.unsqueeze(-1)).mul_(wide.unsqueeze(-1)).sub_(grouped)
            loss = (error.square_() * weights).sum(-1)
            better = loss < best  # never true of NaN, which a step of zero gives
            best = torch.where(better, loss, best)
            scale = torch.where(better, stored, scale)
            if not scheme.symmetric:
                zero = torch.where(better, offset, zero)
    return scale, None if scheme.symmetric else zero.to(torch.uint8)
