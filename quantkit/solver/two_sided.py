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

# In mean diagonals: from 0.03 to 0.3 results differ by less than seeds do.
OUTPUT_DAMPING = 0.1
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
        """List the first output of each block, and the number of outputs."""
        result = [0]
        for block in self.blocks:
            result.append(result[-1] + len(block))
        return result

    def rows(self, start: int, stop: int) -> OutputFactor:
        """Cut out the factor of some of the outputs."""
        parts = []
        for block, (first, last) in zip(self.blocks, pairwise(self.bounds), strict=True):
            overlap = slice(max(start, first) - first, max(min(stop, last) - first, 0))
            if overlap.start < overlap.stop:
                parts.append(block[overlap, overlap])
        return OutputFactor(tuple(parts))

    def to(self, device: torch.device) -> OutputFactor:
        """Copy the factor to another device."""
        return OutputFactor(tuple(block.to(device) for block in self.blocks))

    @classmethod
    def concatenate(cls, parts: Sequence[OutputFactor]) -> OutputFactor:
        """Join the factors of several parts of the outputs, in order."""
        blocks: list[Tensor] = []
        for part in parts:
            blocks += part.blocks
        return cls(tuple(blocks))


def solve_two_sided(
    target: Tensor,
    hessian: Factored,
    outputs: Factored,
    scale: Tensor,
    zero: Tensor | None,
    scheme: QuantScheme,
    kernels: ColumnKernels,
) -> tuple[Tensor, Tensor]:
    """Solve codes and scales of a layer, for groups whose scales have been searched.

    Args:
        target: [I, O] float32.
        hessian: of the inputs, [I, I].
        outputs: the factor of the outputs, [O, O].
        scale, zero: [G, O] of groups, as stored.

    Returns:
        Codes less their zero points, float32 [I, O], and the scales, which are fitted to them, [G,
        O].
    """
    # In the order of the factor: the first row to solve is the last.
    rows = outputs.order.flip(0)
    target = target[:, rows]
    scale = scale[:, rows]
    if zero is not None:
        zero = zero[:, rows]
    codes = torch.empty_like(target)
    errors = torch.empty_like(target)

    def grid_of(output_range: slice) -> Grid:
        if zero is None:
            points = None
        else:
            points = zero[:, output_range].contiguous()
        return Grid.of(scale[:, output_range].contiguous(), points, scheme, len(target))

    def keep(output_range: slice, part_codes: Tensor, grid: Grid) -> None:
        codes[:, output_range] = part_codes
        errors[:, output_range] = target[:, output_range] - grid.values(part_codes)

    # First pass: each block makes up for the errors of the blocks before it.
    for block in _blocks(len(rows)):
        grid = grid_of(block)
        aim = target[:, block].contiguous()
        done = slice(block.stop, len(rows))
        if done.start < done.stop:
            ratios = torch.linalg.solve_triangular(
                outputs.factor[block, block], outputs.factor[block, done], upper=True
            )
            aim += times(errors[:, done], ratios.t())
        block_codes, _ = solve_codes(aim, hessian.factor, grid, hessian.order, kernels)
        keep(block, block_codes, grid)
    # Second pass: each block is fitted to what is best given all other rows.
    ordered = hessian.matrix[hessian.order]
    for block in _blocks(len(rows)):
        coupled = outputs.matrix[rows.unsqueeze(1), rows[block]]
        # The block as a whole: by its inverse in G, its rows do not make up for an error twice.
        coupled = torch.cholesky_solve(coupled.t(), torch.linalg.cholesky(coupled[block])).t()
        missing = times(errors, coupled)
        block_codes = codes[:, block].contiguous()
        aim = grid_of(block).values(block_codes).add_(missing)
        gradient = times(hessian.matrix, missing)
        block_scale = scale[:, block].contiguous()
        scale[:, block], _, _ = refit_scales(gradient, block_codes, hessian.matrix, block_scale)
        grid = grid_of(block)
        block_codes, _ = descend(
            aim, block_codes, hessian.matrix, grid, hessian.order, kernels, ordered
        )
        keep(block, block_codes, grid)
    # Back to the original order; the clones keep rows from being overwritten before they are read.
    codes[:, rows] = codes.clone()
    scale[:, rows] = scale.clone()
    return codes, scale


def _blocks(count: int) -> Iterator[slice]:
    """Yield the blocks of rows in the order in which they are solved, the last first."""
    step = -(-count // _BLOCKS)
    for last in range(count, 0, -step):
        yield slice(max(last - step, 0), last)
