"""The solver's two loops over a weight's columns: rounding with compensation, and coordinate
descent.

Columns are processed in panels. Kernels round a few columns of a panel at a time, by a device's own
code or by torch; the effect of earlier columns on later ones comes from matrix products, and no
value is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quantkit.solver.grid import Grid, search_scales
from quantkit.tensors.code_table import CodeTable, find_table
from quantkit.tensors.products import times
from quantkit.tensors.scheme import QuantScheme

# Columns after which errors reach all later ones by a matrix product.
PANEL_COLUMNS = 256


SearchScales = Callable[[Tensor, Tensor, QuantScheme, torch.dtype], tuple[Tensor, Tensor | None]]
"""As `grid.search_scales`."""
ColumnStep = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor | None,
        int,
        CodeTable | None,
        int,
        Tensor,
        Tensor,
    ],
    None,
]
"""Takes start, target or inverse, ratios, columns, scale, zero, levels, table, size, codes and
errors; see `ColumnKernels`.
"""


@dataclass(frozen=True)
class ColumnKernels:
    """Functions that search scales and round columns [C, O] of a weight one after the other;
    tensors are float32, column indices int64.

    Both steps write `codes` [I, O], less their zero points, in the rows `columns` [C], and add a
    column's error to the later ones by `ratios` [C, C]. `scale` and `zero` are those of groups [G,
    O] of `size` columns; codes without zero points are signed; `levels` is the number of codes.
    Codes of a `table` are in `codes` by their values, and have no zero points.

    Attributes:
        search_scales: finds scales and zero points.
        round_in_turn: ``(start, target, ...)`` rounds `start` [C, O], which is `target` [C, O] with
            the errors of earlier columns compensated, and writes `target` less the codes' values to
            `errors` [C, O].
        improve_in_turn: ``(start, inverse, ...)`` replaces each code by the best one given all
            others, and writes by how much the values have decreased to `errors`. `start` is the
            Hessian times target less values, [C, O], and `inverse` one over the Hessian's diagonal,
            [C].
        max_columns: the most columns in one call of a step.
    """

    search_scales: SearchScales
    round_in_turn: ColumnStep
    improve_in_turn: ColumnStep
    max_columns: int


def _round_in_turn(
    start: Tensor,
    target: Tensor,
    ratios: Tensor,
    columns: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    levels: int,
    table: CodeTable | None,
    size: int,
    codes: Tensor,
    errors: Tensor,
) -> None:
    # The columns that follow are changed in place.
    start = start.clone()
    for i, column in enumerate(columns.tolist()):
        group = column // size
        code = torch.div(start[i], scale[group], out=codes[column])
        _round_(code, None if zero is None else zero[group], levels, table)
        torch.addcmul(target[i], code, scale[group], value=-1, out=errors[i])
        start[i + 1 :].addr_(ratios[i, i + 1 :], errors[i])


def _improve_in_turn(
    start: Tensor,
    inverse: Tensor,
    ratios: Tensor,
    columns: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    levels: int,
    table: CodeTable | None,
    size: int,
    codes: Tensor,
    errors: Tensor,
) -> None:
    start = start.clone()
    factors = inverse.tolist()
    for i, column in enumerate(columns.tolist()):
        group = column // size
        code = codes[column]
        best = torch.add(code, start[i] / scale[group], alpha=factors[i])
        _round_(best, None if zero is None else zero[group], levels, table)
        torch.sub(code, best, out=errors[i]).mul_(scale[group])
        code.copy_(best)
        start[i + 1 :].addr_(ratios[i, i + 1 :], errors[i])


def _round_(quotients: Tensor, zero: Tensor | None, levels: int, table: CodeTable | None) -> None:
    """Round to the nearest codes less their zero point, or numbers of a table, in place."""
    if table is not None:
        quotients.copy_(table.round(quotients))
    elif zero is None:
        quotients.round_().clamp_(-(levels // 2), levels // 2 - 1)
    else:
        quotients.round_().add_(zero).clamp_(0, levels - 1).sub_(zero)


TORCH = ColumnKernels(search_scales, _round_in_turn, _improve_in_turn, 64)
"""A few calls of torch for each column, on any device."""


def with_positive_scales(kernels: ColumnKernels) -> ColumnKernels:
    """Replace the search of kernels by torch's, without negative scales."""
    return replace(kernels, search_scales=partial(search_scales, signed=False))


def solve_codes(
    target: Tensor, factor: Tensor, grid: Grid, order: Tensor, kernels: ColumnKernels = TORCH
) -> tuple[Tensor, Tensor]:
    """Round column after column, with each error compensated by the columns that follow.

    Args:
        target: [I, O] float32.
        factor: [I, I] float32, see `reverse_factor`.
        order: [I] the order of the columns.

    Returns:
        Codes less their zero points, float32 [I, O], in the original column order; and target less
        values, times the factor, [I, O] in the factor's order: its squares add up to the squared
        output errors.
    """
    # In the order of the factor, the first column to round is the last. The buffer holds the target
    # on entry, and whitened errors where columns are done, to use no more memory.
    buffer = grid.add_minima(target)[order.flip(0)]
    errors = torch.empty_like(buffer)
    codes = torch.empty_like(buffer)
    inputs = len(order)
    for first, last in _ranges(inputs, PANEL_COLUMNS):
        panel = slice(inputs - last, inputs - first)
        done = slice(inputs - first, inputs)
        corner = factor[panel, panel]
        diagonal = corner.diagonal().unsqueeze(1)
        # The kernels take columns in the order of rounding, from the first to the last.
        ratios = (corner / diagonal).t().flip(0, 1)
        panel_target = buffer[panel].flip(0)
        whitened = None
        start = panel_target
        panel_errors = torch.empty_like(panel_target)
        if first:
            whitened = times(factor[panel, done], errors[done])
            start = panel_target + (whitened / diagonal).flip(0)
        _run(
            kernels,
            kernels.round_in_turn,
            start,
            panel_target,
            ratios,
            order[first:last],
            grid,
            codes,
            panel_errors,
        )
        errors[panel] = panel_errors.flip(0)
        product = times(corner, errors[panel])
        if whitened is not None:
            product.add_(whitened)
        buffer[panel] = product
    return codes, buffer


def descend(
    target: Tensor,
    codes: Tensor,
    hessian: Tensor,
    grid: Grid,
    order: Tensor,
    kernels: ColumnKernels = TORCH,
    ordered: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one sweep of coordinate descent: each column in turn gets its best codes given the
    others.

    Args:
        target: [I, O] float32.
        codes: [I, O] float32, less their zero points; not changed.
        hessian: [I, I] float32, positive definite.
        order: [I] the order of the columns.
        ordered: ``hessian[order]``, for several calls.

    Returns:
        The codes, and by how much the squared output error of each row decreases, [O].
    """
    codes = codes.clone()
    missing = grid.values(codes).neg_().add_(target)
    gain = torch.zeros(codes.shape[1], dtype=codes.dtype, device=codes.device)
    for first, last in _ranges(len(order), PANEL_COLUMNS):
        columns = order[first:last]
        if ordered is None:
            rows = hessian[columns]
        else:
            rows = ordered[first:last]
        corner = rows[:, columns]
        start = times(rows, missing)
        decrease = torch.empty_like(start)
        inverse = corner.diagonal().reciprocal()
        _run(
            kernels,
            kernels.improve_in_turn,
            start,
            inverse,
            corner,
            columns,
            grid,
            codes,
            decrease,
        )
        missing[columns] += decrease
        # The change of a quadratic form: its gradient times the step, twice, and the step's square.
        gain -= start.mul_(2).add_(times(corner, decrease)).mul_(decrease).sum(0)
    return codes, gain


def _run(
    kernels: ColumnKernels,
    step: ColumnStep,
    start: Tensor,
    target_or_inverse: Tensor,
    ratios: Tensor,
    columns: Tensor,
    grid: Grid,
    codes: Tensor,
    written: Tensor,
) -> None:
    """Run a step over the columns of a panel, a few at a time, with what it has `written` for
    earlier ones compensated.
    """
    table = find_table(grid.scheme.codes, codes.device)
    for begin, end in _ranges(len(columns), kernels.max_columns):
        part = slice(begin, end)
        if begin:
            compensated = start[part] + times(ratios[:begin, part].t(), written[:begin])
        else:
            compensated = start[part]
        step(
            compensated,
            target_or_inverse[part],
            ratios[part, part],
            columns[part],
            grid.scale,
            grid.zero,
            grid.scheme.levels,
            table,
            grid.size,
            codes,
            written[part],
        )


def _ranges(stop: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, stop, step):
        yield begin, min(begin + step, stop)
