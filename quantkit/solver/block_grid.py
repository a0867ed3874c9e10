"""Scales and minima of GGUF's blocks: those with the smallest weighted error, and those that fit
given codes best.

The search finds a scale, and a minimum, for each group as if they were floats. Then they are
rounded to what blocks hold: integers with one float16 for 256 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.solver.grid import weights_at_once
from quantkit.tensors.block_scales import BlockScales
from quantkit.tensors.scheme import QuantScheme

SearchScales = Callable[[Tensor, Tensor, QuantScheme, torch.dtype], tuple[Tensor, Tensor | None]]
"""As `grid.search_scales`."""

_STARTS = (-1.0, -0.5, 0.0, 0.5, 1.0)
"""Steps that are tried first, by how many more of them span a group than it has codes."""
# Rounds in which codes and the line through them improve each other.
_ROUNDS = 2


def search_blocks(
    weight: Tensor, importance: Tensor, scheme: QuantScheme, search: SearchScales
) -> BlockScales:
    """Search the scales [O, G], stored as blocks store them, with a small ``sum(importance * error
    ** 2)`` of rounded weights.

    Args:
        weight: [I, O] float32: inputs first.
        importance: [I] float32, not negative.
        scheme: in blocks of GGUF.
        search: finds the scales of symmetric schemes, stored as floats.
    """
    size = scheme.group_size
    assert size is not None
    grouped = weight.view(-1, size, weight.shape[1])
    weights = importance.view(-1, size, 1)
    if scheme.symmetric:
        scale, _ = search(weight, importance, scheme.of_floats, torch.float32)
        # The search leaves a scale of one for a group of zeros, which would coarsen the integers
        # of its neighbours.
        is_zero = grouped.abs().amax(1) == 0
        return BlockScales.nearest(torch.where(is_zero, 0, scale).t(), None, scheme)
    step_parts = []
    offset_parts = []
    for outputs in _row_slices(weight):
        steps, offsets = _fit_lines(grouped[:, :, outputs], weights, scheme)
        step_parts.append(steps)
        offset_parts.append(offsets)
    all_steps = torch.cat(step_parts, 1).t()
    all_offsets = torch.cat(offset_parts, 1).t()
    return BlockScales.nearest(all_steps, all_offsets, scheme)


def _row_slices(weight: Tensor) -> list[slice]:
    inputs, outputs = weight.shape
    # Fewer than elsewhere in the solver: fitting lines needs several tensors of a part's size.
    count = max(1, weights_at_once(weight.device) // (4 * inputs))
    slices = []
    for start in range(0, outputs, count):
        slices.append(slice(start, start + count))
    return slices


def _fit_lines(grouped: Tensor, weights: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Fit lines through codes to groups [G, S, O], beginning with several steps that span a group,
    or about so; return the best steps and offsets [G, O] float32. `weights` [G, S, 1] are those of
    squared errors.
    """
    high = grouped.amax(1).clamp(min=0)
    low = grouped.amin(1).clamp(max=0)
    best_steps = (high - low) / (scheme.levels - 1)
    best_offsets = -low
    best = torch.full_like(high, torch.inf)
    total = weights.sum(1)
    mean = (weights * grouped).sum(1)
    for extra_steps in _STARTS:
        steps = (high - low) / (scheme.levels - 1 + extra_steps)
        offsets = -low
        # The last round only measures the line of the one before.
        for _ in range(_ROUNDS + 1):
            divisors = torch.where(steps == 0, 1, steps).unsqueeze(1)
            codes = (grouped + offsets.unsqueeze(1)) / divisors
            codes = codes.round_().clamp_(0, scheme.levels - 1)
            error = codes * steps.unsqueeze(1) - offsets.unsqueeze(1) - grouped
            loss = (weights * error.square_()).sum(1)
            better = loss < best
            best = torch.where(better, loss, best)
            best_steps = torch.where(better, steps, best_steps)
            best_offsets = torch.where(better, offsets, best_offsets)
            # Weighted least squares: the line of steps and offsets that fits these codes best.
            weighted = weights * codes
            first = weighted.sum(1)
            second = (weighted * codes).sum(1)
            product = (weighted * grouped).sum(1)
            determinant = total * second - first.square()
            slope = (total * product - first * mean) / determinant
            offsets = (first * product - second * mean) / determinant
            # A minimum above zero cannot be stored: such a line goes through zero instead.
            steps = torch.where(offsets < 0, product / second, slope)
            offsets = offsets.clamp(min=0)
            usable = (determinant > 0) & (steps > 0) & steps.isfinite() & offsets.isfinite()
            steps = torch.where(usable, steps, best_steps)
            offsets = torch.where(usable, offsets, best_offsets)
    return best_steps, best_offsets


def refit_blocks(
    codes: Tensor, scales: BlockScales, refit: Callable[[Tensor, Tensor], Tensor]
) -> BlockScales:
    """Fit the scales of blocks to given codes: their float16 numbers, with the integers as they
    are.

    Args:
        codes: [I, O] float32, of symmetric schemes less their middle.
        refit: takes values [I, O] and the factors [S, O] float16 with which they are multiplied;
            returns better ones.
    """

    def refit_factors(values: Tensor, inner: Tensor, outer: Tensor | None) -> Tensor:
        """Fit float16 numbers [O, S] for values that are multiplied by `inner` and `outer`."""
        factors = inner
        if outer is not None:
            # The integers stay: they belong to the values, and the outer factors are fitted.
            values = values * inner.float().t().repeat_interleave(len(values) // inner.shape[1], 0)
            factors = outer
        return refit(values, factors.t().contiguous()).t().contiguous()

    if scales.outer is None:
        name = "scale"
    else:
        name = "outer"
    result = replace(scales, **{name: refit_factors(codes, scales.scale, scales.outer)})
    if scales.minimum is None:
        return result
    if scales.outer_minimum is None:
        name = "minimum"
    else:
        name = "outer_minimum"
    # The minimum is subtracted from all values of a group alike.
    lowest = refit_factors(torch.full_like(codes, -1), scales.minimum, scales.outer_minimum)
    return replace(result, **{name: lowest})
