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
_ROUNDS = 2  # in which codes and the line through them improve each other


def search_blocks(
    weight: Tensor, importance: Tensor, scheme: QuantScheme, search: SearchScales
) -> BlockScales:
    """Return the scales [O, G], held as blocks hold them, with a small ``sum(importance * error **
    2)`` of rounded weights.

    Args:
        weight: [I, O] float32: inputs first.
        importance: [I] float32, not negative.
        scheme: in blocks of GGUF.
        search: finds the scales of symmetric schemes, held as floats.
    """
    size = scheme.group_size
    assert size is not None
    grouped = weight.view(-1, size, weight.shape[1])
    if scheme.symmetric:
        found, _ = search(weight, importance, scheme.of_floats, torch.float32)
        return BlockScales.nearest(
            torch.where(grouped.abs().amax(1) == 0, 0, found).t(), None, scheme
        )
    weights = importance.view(-1, size, 1)
    parts = []
    for part in _row_slices(weight):
        parts.append(_fit_lines(grouped[:, :, part], weights, scheme))
    steps, offsets = (torch.cat(part, 1).t() for part in zip(*parts, strict=True))
    return BlockScales.nearest(steps, offsets, scheme)


def _row_slices(weight: Tensor) -> list[slice]:
    inputs, outputs = weight.shape
    count = max(1, weights_at_once(weight.device) // (4 * inputs))
    return [slice(start, start + count) for start in range(0, outputs, count)]


def _fit_lines(grouped: Tensor, weights: Tensor, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Steps and offsets [G, O] float32 of the lines through codes that fit groups [G, S, O] best,
    of several that begin with steps which span a group, or about so; `weights` [G, S, 1] are those
    of squared errors.
    """
    high = grouped.amax(1).clamp(min=0)
    low = grouped.amin(1).clamp(max=0)
    best_steps = (high - low) / (scheme.levels - 1)
    best_offsets = -low
    best = torch.full_like(high, torch.inf)
    total = weights.sum(1)
    mean = (weights * grouped).sum(1)
    for more in _STARTS:
        steps = (high - low) / (scheme.levels - 1 + more)
        offsets = -low
        for _ in range(_ROUNDS + 1):
            codes = (grouped + offsets.unsqueeze(1)) / torch.where(steps == 0, 1, steps).unsqueeze(
                1
            )
            codes = codes.round_().clamp_(0, scheme.levels - 1)
            error = codes * steps.unsqueeze(1) - offsets.unsqueeze(1) - grouped
            loss = (weights * error.square_()).sum(1)
            better = loss < best
            best = torch.where(better, loss, best)
            best_steps = torch.where(better, steps, best_steps)
            best_offsets = torch.where(better, offsets, best_offsets)
            weighted = weights * codes
            first = weighted.sum(1)
            second = (weighted * codes).sum(1)
            product = (weighted * grouped).sum(1)
            determinant = total * second - first.square()
            slope = (total * product - first * mean) / determinant
            offsets = (first * product - second * mean) / determinant
            # Through zero, where all would be above it.
            steps = torch.where(offsets < 0, product / second, slope)
            offsets = offsets.clamp(min=0)
            usable = (determinant > 0) & (steps > 0) & steps.isfinite() & offsets.isfinite()
            steps = torch.where(usable, steps, best_steps)
            offsets = torch.where(usable, offsets, best_offsets)
    return best_steps, best_offsets


def refit_blocks(
    codes: Tensor, scales: BlockScales, refit: Callable[[Tensor, Tensor], Tensor]
) -> BlockScales:
    """Scales of blocks that fit given codes best: their float16 numbers, with the integers as they
    are.

    Args:
        codes: [I, O] float32, of symmetric schemes less their middle.
        refit: takes values [I, O] and the factors [S, O] float16 with which they are multiplied;
            returns better ones.
    """

    def refit_factors(values: Tensor, inner: Tensor, outer: Tensor | None) -> Tensor:
        """Better float16 numbers [O, S] for values that are multiplied with `inner` and `outer`."""
        if outer is not None:
            values = values * inner.float().t().repeat_interleave(len(values) // inner.shape[1], 0)
        return refit(values, (inner if outer is None else outer).t().contiguous()).t().contiguous()

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
    lowest = refit_factors(torch.full_like(codes, -1), scales.minimum, scales.outer_minimum)
    return replace(result, **{name: lowest})
