"""What the solver does to single weights, one input after the other: by a device's kernels, or by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.solver.grid import search_scales
from quantkit.tensors.scheme import QuantScheme


class SearchScales(Protocol):
    """As `grid.search_scales`."""

    def __call__(
        self, weight: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]: ...


class RoundInTurn(Protocol):
    """Write the columns' codes, and what their values lack of `wanted` [C, O] to `errors` [C, O]; `start` [C, O] is
    what is rounded, so far as earlier columns have moved it."""

    def __call__(
        self, start: Tensor, wanted: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor, zero: Tensor | None,
        levels: int, size: int, codes: Tensor, errors: Tensor,
    ) -> None: ...  # fmt: skip


class CoordinateDescentStep(Protocol):
    """Give the columns the codes that are best with all others as they are; write how much less their values have
    become to `errors` [C, O].

    `start` is Hessian times what the values lack, [C, O], and `inverse` one over the Hessian's diagonal, [C].
    """

    def __call__(
        self, start: Tensor, inverse: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor, zero: Tensor | None,
        levels: int, size: int, codes: Tensor, errors: Tensor,
    ) -> None: ...  # fmt: skip


@dataclass(frozen=True)
class ColumnKernels:
    """What searches scales and rounds some columns [C, O] of a weight in turn; all in float32, but for numbers in
    int64.

    For both that round, `ratios` [C, C] are how much of one column's error, by row, each later one takes up; `columns`
    are the columns' numbers [C]; `scale` and `zero` those of groups [G, O] of `size` columns, where codes without zero
    points are signed; `levels` is the number of codes; and `codes` [I, O] are less their zero points.

    Attributes:
        at_once: how many columns at most are given to those that round.
    """

    search_scales: SearchScales
    round_in_turn: RoundInTurn
    improve_in_turn: CoordinateDescentStep
    at_once: int


def _round_in_turn(
    start: Tensor, wanted: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor, zero: Tensor | None, levels: int,
    size: int, codes: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    start = start.clone()
    for i, column in enumerate(columns.tolist()):
        group = column // size
        code = torch.div(start[i], scale[group], out=codes[column])
        _round_(code, None if zero is None else zero[group], levels)
        torch.addcmul(wanted[i], code, scale[group], value=-1, out=errors[i])
        start[i + 1 :].addr_(ratios[i, i + 1 :], errors[i])


def _improve_in_turn(
    start: Tensor, inverse: Tensor, ratios: Tensor, columns: Tensor, scale: Tensor, zero: Tensor | None, levels: int,
    size: int, codes: Tensor, errors: Tensor,
) -> None:  # fmt: skip
    start, factors = start.clone(), inverse.tolist()
    for i, column in enumerate(columns.tolist()):
        group, code = column // size, codes[column]
        best = torch.add(code, start[i] / scale[group], alpha=factors[i])
        _round_(best, None if zero is None else zero[group], levels)
        torch.sub(code, best, out=errors[i]).mul_(scale[group])
        code.copy_(best)
        start[i + 1 :].addr_(ratios[i, i + 1 :], errors[i])


def _round_(steps: Tensor, zero: Tensor | None, levels: int) -> None:
    """The nearest codes less their zero point, in place."""
    if zero is None:
        steps.round_().clamp_(-(levels // 2), levels // 2 - 1)
    else:
        steps.round_().add_(zero).clamp_(0, levels - 1).sub_(zero)


TORCH = ColumnKernels(search_scales, _round_in_turn, _improve_in_turn, 64)
"""Some calls of torch for each column, on any device."""
