"""Rounding to nearest on searched scales: for each group the scale with the smallest squared
error of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quantkit.solver.block_grid import search_blocks
from quantkit.solver.columns import TORCH, ColumnKernels
from quantkit.solver.float_search import quantize_small_floats
from quantkit.tensors.qtensor import (
    CACHED_ELEMENTS,
    QuantTensor,
    Solver,
    concatenate_rows,
    nearest_codes,
    quantize_rtn,
    row_chunks,
    spanning_scales,
)
from quantkit.tensors.scheme import QuantScheme, Scales

Importance = Mapping[str, Tensor]
"""How much the errors of each input's weights count, [I], by name of the linear; see
`round_to_nearest`.
"""

SEARCHED_ELEMENTS = 1 << 24
"""Elements of a weight that are copied in float32 at a time."""


def round_to_nearest(
    weight: Tensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    kernels_of: Callable[[torch.device], ColumnKernels],
    importance: Tensor | None = None,
    outer: Tensor | None = None,
) -> tuple[QuantTensor, str]:
    """Round a weight to nearest; return it, and what manifests call its solver.

    int8 is rounded on scales that span its groups, fewer bits on searched ones: with 256 levels, a
    search gains little.

    Args:
        weight: [O, I], any float dtype, finite.
        scheme: the group size must divide I.
        scale_dtype: dtype the scales are stored in.
        kernels_of: returns the kernels of a device; not called for int8, since they may have to be
            compiled.
        importance: [I] float32, positive: how much the errors of an input's weights count; None is
            all the same.
        outer: float32 [1] of NVFP4, see `quantize_rtn`.
    """
    if importance is None:
        solver = Solver.SEARCHED
    else:
        solver = Solver.WEIGHTED
    if scheme.of_small_floats and scheme.bits == 4:
        return quantize_small_floats(weight, scheme, importance, outer), solver
    if scheme.bits == 8:
        return quantize_rtn(weight, scheme, scale_dtype), Solver.ROUNDING
    kernels = kernels_of(weight.device)
    if scheme.scales is Scales.FLOATS:
        quantized = quantize_searched(weight, scheme, scale_dtype, kernels, importance)
    else:
        quantized = _quantize_blocks(weight, scheme, kernels, importance)
    return quantized, solver


def quantize_searched(
    weight: Tensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    kernels: ColumnKernels = TORCH,
    importance: Tensor | None = None,
) -> QuantTensor:
    """Round each weight to the nearest code of the scale with which its group has the smallest
    squared error.

    The scales are searched as for GPTQ, so symmetric ones may be negative. Then each is replaced by
    the scale that fits its group's codes best, if the codes nearest to that have a smaller error.
    No group has a larger error, weighted by importance, than by `quantize_rtn`, which finds the
    scales of groups whose squares overflow. `kernels` are those of the weight's device; the other
    arguments are as in `round_to_nearest`.
    """
    rows, columns = weight.shape
    groups = scheme.groups(columns)
    if importance is None:
        importance = torch.ones(columns, device=weight.device)
    else:
        importance = importance.to(weight.device)
    grouped_importance = importance.view(groups, -1)
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(rows, groups, dtype=scale_dtype, device=weight.device)
    if scheme.symmetric:
        zero = None
    else:
        zero = torch.empty_like(scale, dtype=torch.uint8)
    for first, last in row_chunks(rows, columns, SEARCHED_ELEMENTS):
        part = weight[first:last].float().t().contiguous()
        searched, offsets = kernels.search_scales(part, importance, scheme, scale_dtype)
        scale[first:last] = searched.t()
        if zero is not None and offsets is not None:
            zero[first:last] = offsets.t()
    # Smaller chunks than for the search, since each of several passes reads all of a chunk.
    for start, stop in row_chunks(rows, columns, CACHED_ELEMENTS):
        grouped = weight[start:stop].float().view(stop - start, groups, -1)
        overflowing = grouped.square().mul_(grouped_importance).sum(-1).isinf()
        if overflowing.any():
            # With an infinite loss for every scale, the search finds none.
            spanning = quantize_rtn(weight[start:stop], scheme, scale_dtype)
            scale[start:stop][overflowing] = spanning.scale[overflowing]
            if zero is not None and spanning.zero is not None:
                zero[start:stop][overflowing] = spanning.zero[overflowing]
        offset: Tensor | int
        if zero is None:
            offset = scheme.levels // 2
        else:
            offset = zero[start:stop].float().unsqueeze(-1)
        fitted, signed_codes = _fit_scales(
            grouped, grouped_importance, scale[start:stop], offset, scheme
        )
        scale[start:stop] = fitted
        unsigned_codes = signed_codes.add_(offset).view(stop - start, columns)
        codes[start:stop] = unsigned_codes.to(torch.int16)
    return QuantTensor(codes, scale, zero, scheme)


def _quantize_blocks(
    weight: Tensor, scheme: QuantScheme, kernels: ColumnKernels, importance: Tensor | None
) -> QuantTensor:
    """Quantize as `quantize_searched`, in blocks of GGUF.

    A row has the scales that span its groups where these are better.
    """
    if importance is None:
        importance = torch.ones(weight.shape[1], device=weight.device)
    else:
        importance = importance.to(weight.device)
    parts = []
    for start, stop in row_chunks(weight.shape[0], weight.shape[1], SEARCHED_ELEMENTS // 4):
        rows = weight[start:stop].float()
        scales = search_blocks(rows.t().contiguous(), importance, scheme, kernels.search_scales)
        grouped = rows.view(len(rows), scheme.groups(rows.shape[1]), -1)
        codes = nearest_codes(grouped, scales, scheme)
        searched = QuantTensor.of_blocks(codes, scales, scheme)
        spanning = quantize_rtn(rows, scheme, torch.float16)
        # By row, not by group: groups share the float16 numbers of a block.
        searched_loss = (searched.dequantize() - rows).square_().mul_(importance).sum(1)
        spanning_loss = (spanning.dequantize() - rows).square_().mul_(importance).sum(1)
        parts.append(searched.merge_rows(searched_loss <= spanning_loss, spanning))
    return concatenate_rows(parts)


def _fit_scales(
    grouped: Tensor, importance: Tensor, scale: Tensor, offset: Tensor | int, scheme: QuantScheme
) -> tuple[Tensor, Tensor]:
    """Choose the better of some scales [O, G] and those that fit their codes best; return them and
    the codes less zero points [O, G, S]. `importance` [G, S] is that of squared errors.

    A scale that does not fit its type stays infinite, as by `quantize_rtn`, so that callers find
    it.
    """
    spanning = spanning_scales(grouped, scheme, scale.dtype)
    scale = torch.where(spanning.isfinite(), scale, spanning)
    signed_codes, loss = _round_to_grid(grouped, importance, scale, offset, scheme)
    # Least squares of one unknown for each group.
    weighted = signed_codes * importance
    fitted = ((weighted * grouped).sum(-1) / weighted.mul_(signed_codes).sum(-1)).to(scale.dtype)
    fitted_codes, fitted_loss = _round_to_grid(grouped, importance, fitted, offset, scheme)
    # Never true of NaN, which a scale of zero gives.
    better = fitted_loss < loss
    chosen_codes = torch.where(better.unsqueeze(-1), fitted_codes, signed_codes)
    return torch.where(better, fitted, scale), chosen_codes


def _round_to_grid(
    grouped: Tensor, importance: Tensor, scale: Tensor, offset: Tensor | int, scheme: QuantScheme
) -> tuple[Tensor, Tensor]:
    """Round to codes less zero points [O, G, S]; return them, and their weighted squared errors
    [O, G].
    """
    wide = scale.float().unsqueeze(-1)
    signed_codes = (grouped / wide).round_().add_(offset).clamp_(0, scheme.levels - 1).sub_(offset)
    return signed_codes, (signed_codes * wide).sub_(grouped).square_().mul_(importance).sum(-1)
