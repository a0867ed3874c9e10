"""Triangular factors of symmetric matrices, and what is solved with them: mostly matrix products, which are fast."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.tensors.products import times

_BLOCK = 256
_STRIPS = 8


def cholesky(matrix: Tensor) -> Tensor | None:
    """The lower triangular L with ``matrix = L @ L.T``, [N, N]; None if the matrix is not positive definite.

    Args:
        matrix: used up; only its lower triangle counts.
    """
    if matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix)
        return None if info else factor
    size = len(matrix)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        if start:
            matrix[start:, start:stop].sub_(times(matrix[start:, :start], matrix[start:stop, :start].t()))
        corner, info = torch.linalg.cholesky_ex(matrix[start:stop, start:stop])
        if info:
            return None
        matrix[start:stop, start:stop] = corner
        matrix[start:stop, stop:] = 0
        if stop < size:
            below = matrix[stop:, start:stop]
            below.copy_(torch.linalg.solve_triangular(corner.t(), below, upper=True, left=False))
    return matrix


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """The X [N, O] with ``factor @ X = right`` for a lower triangular factor [N, N]."""
    found = right.clone()
    for start in range(0, len(factor), _BLOCK):
        stop = min(start + _BLOCK, len(factor))
        if start:
            found[start:stop].sub_(times(factor[start:stop, :start], found[:start]))
        corner = factor[start:stop, start:stop]
        found[start:stop] = torch.linalg.solve_triangular(corner, found[start:stop], upper=False)
    return found


def solve_lower_transposed(factor: Tensor, right: Tensor) -> Tensor:
    """The X [N, O] with ``factor.T @ X = right`` for a lower triangular factor [N, N]."""
    found = right.clone()
    for start in reversed(range(0, len(factor), _BLOCK)):
        stop = min(start + _BLOCK, len(factor))
        if stop < len(factor):
            found[start:stop].sub_(times(factor[stop:, start:stop].t(), found[stop:]))
        corner = factor[start:stop, start:stop].t()
        found[start:stop] = torch.linalg.solve_triangular(corner, found[start:stop], upper=True)
    return found


def lower_transposed_times(factor: Tensor, right: Tensor) -> Tensor:
    """``factor.T @ right`` for a lower triangular factor [N, N] and [N, O]."""
    found = torch.empty_like(right)
    step = max(_BLOCK, -(-len(factor) // _STRIPS))
    for start in range(0, len(factor), step):
        found[start : start + step] = times(factor[start:, start : start + step].t(), right[start:])
    return found
