"""The scales of small floats of 4 bits with the smallest squared error, of a few near those that
span the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.tensors import float_codes
from quantkit.tensors.qtensor import (
    CACHED_ELEMENTS,
    QuantTensor,
    concatenate_rows,
    row_chunks,
    small_floats,
)
from quantkit.tensors.scheme import QuantScheme, Scales


def quantize_small_floats(
    weight: Tensor,
    scheme: QuantScheme,
    importance: Tensor | None = None,
    outer: Tensor | None = None,
) -> QuantTensor:
    """Round each weight to the nearest code of the scale with which its group has the smallest
    squared error.

    Scales are tried that are next to the spanning one in their type: powers of two for MXFP4, e4m3
    numbers for NVFP4. No group has a larger error, weighted by importance, than by `quantize_rtn`.

    Args:
        weight: [O, I], any float dtype, finite.
        scheme: MXFP4 or NVFP4; the group size must divide I.
        importance: [I] float32, positive; None is all the same.
        outer: float32 [1] of NVFP4; see `quantize_rtn`.
    """
    groups = scheme.groups(weight.shape[1])
    if importance is None:
        weights = torch.ones(weight.shape[1])
    else:
        weights = importance
    weights = weights.to(weight.device).view(groups, -1)
    if scheme.scales is Scales.NESTED and outer is None:
        # Of the whole weight, before it is cut into rows.
        outer = float_codes.outer_scale(weight)
    parts = []
    for start, stop in row_chunks(len(weight), weight.shape[1], CACHED_ELEMENTS):
        parts.append(_search_scales(weight[start:stop].float(), scheme, weights, outer))
    return concatenate_rows(parts)


def _search_scales(
    rows: Tensor, scheme: QuantScheme, weights: Tensor, outer: Tensor | None
) -> QuantTensor:
    grouped = rows.view(len(rows), len(weights), -1)
    spanning, outer = float_codes.spanning_scales(rows, scheme, torch.float32, outer)
    best_scale = spanning
    best = _loss(grouped, spanning, outer, scheme, weights)
    for scale in float_codes.neighbours(spanning, scheme):
        loss = _loss(grouped, scale, outer, scheme, weights)
        # Never true of squares that overflow.
        better = loss < best
        best = torch.where(better, loss, best)
        best_scale = torch.where(better, scale, best_scale)
    return small_floats(rows, best_scale, outer, scheme)


def _loss(
    grouped: Tensor, scale: Tensor, outer: Tensor | None, scheme: QuantScheme, weights: Tensor
) -> Tensor:
    """Compute the weighted squared errors [O, G] of rounding groups [O, G, S]."""
    steps = scale.float()
    if outer is not None:
        steps = steps / outer
    steps = steps.unsqueeze(-1)
    # A group of zeros has a step of zero.
    quotients = torch.where(steps == 0, 0.0, grouped / steps)
    values = float_codes.round_to_code_values(quotients, scheme.codes)
    return values.mul_(steps).sub_(grouped).square_().mul_(weights).sum(-1)
