"""GPTQ with feedback in two directions: from input to input within a row, and from each row to
those solved later.

The loss is ``tr(G E H E^T)`` for errors E [O, I] of the weights, the Hessian H [I, I] of the
inputs, and a factor G [O, O] of the outputs: the mean of ``g g^T``, where g are the gradients of
what the model predicts. In it, errors of several outputs cancel out where the model adds these up.
YAQA (2505.22988), whose first estimate of G this is.

The Cholesky factors of both matrices give what the rows that are still to be solved should make up
for. Rows are solved in blocks, the ones with the largest gradients first, and a block's rows do not
see each other's errors. Then each block gets scales and codes for what is best given all other
rows, which is a sweep of descent from block to block. A block makes up for the others' errors as a
whole: if each of its rows did so alone, they would do it several times over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from quantkit.solver.columns import ColumnKernels, descend, solve_codes
from quantkit.solver.grid import Grid
from quantkit.solver.refit import refit_scales
from quantkit.tensors.products import times
from quantkit.tensors.scheme import QuantScheme

OUTPUT_DAMPING = 0.1  # in mean diagonals: from 0.03 to 0.3 results differ by less than seeds do
_BLOCKS = 64


class Factored(Protocol):
    """A damped matrix [N, N] with its factor; see `gptq.Damped`."""

    @property
    def matrix(self) -> Tensor: ...
    @property
    def diagonal(self) -> Tensor: ...
    @property
    def order(self) -> Tensor: ...
    @property
    def factor(self) -> Tensor: ...


@dataclass(frozen=True)
class OutputFactor:
    """The factor G of a layer's outputs, whose rows belong together block by block.

    Attributes:
        blocks: of consecutive outputs, each symmetric, [N, N] float32; between two blocks G is
            zero.
    """

    blocks: tuple[Tensor, ...]

    @property
    def bounds(self) -> list[int]:
        """Return where blocks begin, and the number of outputs."""
        result = [0]
        for block in self.blocks:
            result.append(result[-1] + len(block))
        return result

    def rows(self, start: int, stop: int) -> OutputFactor:
        """Return the factor of some of the outputs."""
        parts = []
        for block, (first, last) in zip(self.blocks, pairwise(self.bounds), strict=True):
            here = slice(max(start, first) - first, max(min(stop, last) - first, 0))
            if here.start < here.stop:
                parts.append(block[here, here])
        return OutputFactor(tuple(parts))

    def to(self, device: torch.device) -> OutputFactor:
        """Return the same on another device."""
        return OutputFactor(tuple(block.to(device) for block in self.blocks))

    @classmethod
    def concatenate(cls, parts: Sequence[OutputFactor]) -> OutputFactor:
        """Return the factor of all outputs, in order."""
        return cls(tuple(block for part in parts for block in part.blocks))


def solve_two_sided(
    target: Tensor,
    hessian: Factored,
    outputs: Factored,
    scale: Tensor,
    zero: Tensor | None,
    scheme: QuantScheme,
    kernels: ColumnKernels,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a layer, for groups whose scales have been searched.

    Args:
        target: [I, O] float32.
        hessian: of the inputs, [I, I].
        outputs: the factor of the outputs, [O, O].
        scale, zero: [G, O] of groups, as stored.

    Returns:
        Codes less their zero points, float32 [I, O], and the scales, which are fitted to them, [G,
        O].
    """
    # The first to solve is the last, as in the factor.
    rows = outputs.order.flip(0)
    wanted = target[:, rows]
    scale = scale[:, rows]
    zero = None if zero is None else zero[:, rows]
    codes = torch.empty_like(wanted)
    errors = torch.empty_like(wanted)

    def grid_of(output_range: slice) -> Grid:
        if zero is None:
            points = None
        else:
            points = zero[:, output_range].contiguous()
        return Grid.of(scale[:, output_range].contiguous(), points, scheme, len(wanted))

    def keep(output_range: slice, part_codes: Tensor, grid: Grid) -> None:
        codes[:, output_range] = part_codes
        errors[:, output_range] = wanted[:, output_range] - grid.values(part_codes)

    for block in _blocks(len(rows)):
        grid = grid_of(block)
        aim = wanted[:, block].contiguous()
        done = slice(block.stop, len(rows))
        if done.start < done.stop:
            ratios = torch.linalg.solve_triangular(
                outputs.factor[block, block], outputs.factor[block, done], upper=True
            )
            aim += times(errors[:, done], ratios.t())
        found, _ = solve_codes(aim, hessian.factor, grid, hessian.order, kernels)
        keep(block, found, grid)
    ordered = hessian.matrix[hessian.order]
    for block in _blocks(len(rows)):
        coupled = outputs.matrix[rows.unsqueeze(1), rows[block]]
        coupled = torch.cholesky_solve(coupled.t(), torch.linalg.cholesky(coupled[block])).t()
        missing = times(errors, coupled)
        found = codes[:, block].contiguous()
        aim = grid_of(block).values(found).add_(missing)
        gradient = times(hessian.matrix, missing)
        scale[:, block], _, _ = refit_scales(
            gradient, found, hessian.matrix, scale[:, block].contiguous()
        )
        grid = grid_of(block)
        found, _ = descend(aim, found, hessian.matrix, grid, hessian.order, kernels, ordered)
        keep(block, found, grid)
    codes[:, rows], scale[:, rows] = codes.clone(), scale.clone()
    return codes, scale


def _blocks(count: int) -> Iterator[slice]:
    """Yield the blocks of rows in the order in which they are solved, the last first."""
    step = -(-count // _BLOCKS)
    for last in range(count, 0, -step):
        yield slice(max(last - step, 0), last)
