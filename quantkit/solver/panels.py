"""The solver's two loops over inputs: panels of inputs, of which kernels round a few at a time.

What the panels before have to give to one comes from a single product, and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.solver.columns import TORCH, ColumnKernels
from quantkit.solver.grid import Grid
from quantkit.tensors.products import times

_PANEL = 256


def solve_codes(
    target: Tensor, factor: Tensor, grid: Grid, order: Tensor, kernels: ColumnKernels = TORCH
) -> tuple[Tensor, Tensor]:
    """Round input after input, letting those to come make up for each error.

    Args:
        target: [I, O] float32.
        factor: [I, I] float32, see `reverse_factor`.
        order: [I] the order of the inputs.
        kernels: of the device.

    Returns:
        Codes less their zero points, float32 [I, O], in the inputs' own order; and what they lack, times the factor,
        [I, O] in the factor's order: its squares add up to the squared output errors.
    """
    wanted = target[order.flip(0)]  # the first to round is the last, as in the factor; whitened errors take its place
    errors, codes = torch.empty_like(wanted), torch.empty_like(wanted)
    inputs = len(order)
    for first, last in _ranges(inputs, _PANEL):
        here, later = slice(inputs - last, inputs - first), slice(inputs - first, inputs)
        corner = factor[here, here]
        diagonal = corner.diagonal().unsqueeze(1)
        ratios = (corner / diagonal).t().flip(0, 1)
        own, whitened = wanted[here].flip(0), None
        start, wrong = own, torch.empty_like(own)
        if first:
            whitened = times(factor[here, later], errors[later])
            start = own + (whitened / diagonal).flip(0)
        for begin, end in _ranges(last - first, kernels.at_once):
            some = slice(begin, end)
            kernels.round_in_turn(
                _moved(start[some], ratios[:begin, some], wrong[:begin]), own[some], ratios[some, some],
                order[first + begin : first + end], grid.scale, grid.zero, grid.scheme.levels, grid.size, codes,
                wrong[some],
            )  # fmt: skip
        errors[here] = wrong.flip(0)
        product = times(corner, errors[here])
        wanted[here] = product if whitened is None else product.add_(whitened)
    return codes, wanted


def descend(
    target: Tensor, codes: Tensor, hessian: Tensor, grid: Grid, order: Tensor, kernels: ColumnKernels = TORCH
) -> tuple[Tensor, Tensor]:
    """One sweep of coordinate descent: each input in turn takes its best codes given the others.

    Args:
        target: [I, O] float32.
        codes: [I, O] float32, less their zero points; not changed.
        hessian: [I, I] float32, positive definite.
        grid, order, kernels: as for `solve_codes`.

    Returns:
        The codes, and by how much the squared output error of each row is less, [O].
    """
    codes = codes.clone()
    missing = grid.values(codes).neg_().add_(target)
    gain = torch.zeros(codes.shape[1], dtype=codes.dtype, device=codes.device)
    for first, last in _ranges(len(order), _PANEL):
        columns = order[first:last]
        rows = hessian[columns]
        corner = rows[:, columns]
        inverse = corner.diagonal().reciprocal()
        start = times(rows, missing)
        moved = torch.empty_like(start)
        for begin, end in _ranges(last - first, kernels.at_once):
            some = slice(begin, end)
            kernels.improve_in_turn(
                _moved(start[some], corner[:begin, some], moved[:begin]), inverse[some], corner[some, some],
                columns[some], grid.scale, grid.zero, grid.scheme.levels, grid.size, codes, moved[some],
            )  # fmt: skip
        missing[columns] += moved
        gain -= start.mul_(2).add_(times(corner, moved)).mul_(moved).sum(0)
    return codes, gain


def _moved(start: Tensor, ratios: Tensor, errors: Tensor) -> Tensor:
    """Columns [C, O] with the errors [N, O] of earlier ones made up for, by ratios [N, C]."""
    return start + times(ratios.t(), errors) if len(errors) else start


def _ranges(stop: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, stop, step):
        yield begin, min(begin + step, stop)
