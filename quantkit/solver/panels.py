"""The solver's two loops over inputs on a card: panels of inputs, of which kernels round a few at a time.

What the panels before have to give to one comes from a single product, and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from quantkit.solver.grid import Grid

_PANEL = 128
_TOGETHER = 32


class ColumnKernels(Protocol):
    """What rounds some columns [C, O] of a weight in turn, on a device; all in float32, but for numbers in int64.

    For both `ratios` [C, C] are how much of one column's error, by row, each later one takes up; `columns` are the
    columns' numbers [C]; `scale` and `zero` those of groups [G, O] of `size` columns, where codes without zero points
    are signed; `levels` is the number of codes; and `codes` [I, O] are less their zero points.
    """

    def round_in_turn(
        self, start: Tensor, wanted: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor, zero: Tensor | None,
        levels: int, size: int, codes: Tensor, errors: Tensor,
    ) -> None:  # fmt: skip
        """Write the columns' codes, and what their values lack of `wanted` [C, O] to `errors` [C, O].

        Args:
            start: what is rounded, so far as earlier columns have moved it, [C, O].
        """
        ...

    def improve_in_turn(
        self, start: Tensor, inverse: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor, zero: Tensor | None,
        levels: int, size: int, codes: Tensor, values: Tensor, errors: Tensor,
    ) -> None:  # fmt: skip
        """Give the columns the codes that are best with all others as they are, also as `values` [I, O]; write how
        much less these have become to `errors` [C, O].

        Args:
            start: Hessian times what the values lack, [C, O].
            inverse: one over the Hessian's diagonal, [C].
        """
        ...


def solve_in_panels(target: Tensor, factor: Tensor, grid: Grid, order: Tensor, kernels: ColumnKernels) -> Tensor:
    """As `solve_codes`."""
    wanted = target[order]
    errors, codes = torch.empty_like(wanted), torch.empty_like(wanted)
    diagonal = factor.diagonal().flip(0)
    inputs = len(order)
    for first, last in _ranges(0, inputs, _PANEL):
        # The inputs of the factor are in reverse order.
        ratios = factor[inputs - last : inputs - first, inputs - last :].t().flip(0, 1) / diagonal[first:last]
        start = _moved(wanted[first:last], ratios[:first], errors[:first])
        for begin, end in _ranges(first, last, _TOGETHER):
            own = slice(begin - first, end - first)
            here = _moved(start[own], ratios[first:begin, own], errors[first:begin])
            kernels.round_in_turn(
                here, wanted[begin:end], ratios[begin:end, own], order[begin:end], grid.scale, grid.zero,
                grid.scheme.levels, grid.size, codes, errors[begin:end],
            )  # fmt: skip
    return codes


def descend_in_panels(
    pull: Tensor, codes: Tensor, hessian: Tensor, grid: Grid, order: Tensor, kernels: ColumnKernels
) -> Tensor:
    """As `descend`."""
    codes = codes.clone()
    values = grid.values(codes)
    for first, last in _ranges(0, len(order), _PANEL):
        columns = order[first:last]
        rows = hessian[columns]
        corner = rows[:, columns]
        inverse = corner.diagonal().reciprocal()
        start = torch.addmm(pull[columns], rows, values, alpha=-1)
        errors = torch.empty_like(start)
        for begin, end in _ranges(0, last - first, _TOGETHER):
            own = slice(begin, end)
            here = _moved(start[own], corner[:begin, own], errors[:begin])
            kernels.improve_in_turn(
                here, inverse[own], corner[own, own], columns[own], grid.scale, grid.zero,
                grid.scheme.levels, grid.size, codes, values, errors[own],
            )  # fmt: skip
    return codes


def _moved(start: Tensor, ratios: Tensor, errors: Tensor) -> Tensor:
    """Columns [C, O] with the errors [N, O] of earlier ones made up for, by ratios [N, C]."""
    return torch.addmm(start, ratios.t(), errors) if len(errors) else start


def _ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)
