"""Triangular factors of symmetric matrices, and solving with them: mostly matrix products, which are fast.

Factors are upper triangular, so that most operations multiply parts of their rows, which are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.tensors.products import times

BLOCK_SIZE = 512
_STRIPS = 8


def cholesky(matrix: Tensor) -> Tensor | None:
    """The upper triangular U with ``matrix = U.T @ U``, [N, N]; None if the matrix is not positive definite.

    Args:
        matrix: overwritten; only its upper triangle is read.
    """
    if matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix, upper=True)
        return None if info else factor
    size = len(matrix)
    for start in range(0, size, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, size)
        if start:
            matrix[start:stop, start:].sub_(times(matrix[:start, start:stop].t(), matrix[:start, start:]))
        corner, info = torch.linalg.cholesky_ex(matrix[start:stop, start:stop], upper=True)
        if info:
            return None
        matrix[start:stop, start:stop] = corner
        matrix[stop:, start:stop] = 0
        if stop < size:
            right = matrix[start:stop, stop:]
            right.copy_(torch.linalg.solve_triangular(corner.t(), right, upper=False))
    return matrix


def solve_factored(factor: Tensor, right: Tensor) -> Tensor:
    """The X [N, O] with ``factor.T @ factor @ X = right`` for an upper triangular factor [N, N]."""
    found = right.clone()
    blocks = [(start, min(start + BLOCK_SIZE, len(factor))) for start in range(0, len(factor), BLOCK_SIZE)]
    identity = torch.eye(BLOCK_SIZE, dtype=factor.dtype, device=factor.device)
    inverses = []  # of the blocks on the diagonal, so that all other steps are products
    for start, stop in blocks:
        corner = factor[start:stop, start:stop]
        inverses.append(torch.linalg.solve_triangular(corner, identity[: len(corner), : len(corner)], upper=True))
    for (start, stop), inverse in zip(blocks, inverses, strict=True):
        if start:
            found[start:stop].sub_(times(factor[:start, start:stop].t(), found[:start]))
        found[start:stop] = times(inverse.t(), found[start:stop])
    for (start, stop), inverse in reversed(list(zip(blocks, inverses, strict=True))):
        if stop < len(factor):
            found[start:stop].sub_(times(factor[start:stop, stop:], found[stop:]))
        found[start:stop] = times(inverse, found[start:stop])
    return found


def upper_transposed_times(factor: Tensor, right: Tensor) -> Tensor:
    """``factor.T @ right`` for an upper triangular factor [N, N] and [N, O]."""
    found = torch.empty_like(right)
    step = max(BLOCK_SIZE, -(-len(factor) // _STRIPS))
    for start in range(0, len(factor), step):
        stop = min(start + step, len(factor))
        found[start:stop] = times(factor[:stop, start:stop].t(), right[:stop])
    return found
