"""GPTQ: codes that minimize a layer's output error, given the Hessian of its inputs.

Sources: GPTQ (2210.17323) with activation order over static groups; the asymmetric
calibration target of GPTAQ (2504.02692), which makes up for the error of earlier
layers; coordinate descent as in QuantEase (2309.01885). The result needs no column
order on disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import NonFiniteError
from quantkit.qtensor import QuantTensor
from quantkit.scheme import QuantScheme
from quantkit.solver.grid import search_scales

DAMPING = 0.01
_MOST_DAMPING = 1.0
_BLOCK = 128
_REFIT_BYTES = 1 << 28


@dataclass(frozen=True)
class GptqReport:
    """How a layer was solved.

    Attributes:
        damping: share of the mean diagonal that was added to the Hessian.
        output_error: root of the mean squared output error over that of the outputs.
        dead_columns: inputs that were zero throughout the calibration.
    """

    damping: float
    output_error: float
    dead_columns: int


@dataclass(frozen=True)
class Grid:
    """Where codes may lie: scale and zero point per column, float32 [O, I], and the top code."""

    scale: Tensor
    zero: Tensor
    top: int

    def round(self, values: Tensor, columns: Tensor | slice | int) -> Tensor:
        """The nearest codes less their zero point, for values of some columns."""
        zero = self.zero[:, columns]
        return (values / self.scale[:, columns]).round_().add_(zero).clamp_(0, self.top).sub_(zero)


def gptq(
    weight: Tensor, hessian: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, *, drift: Tensor | None = None
) -> tuple[QuantTensor, GptqReport]:
    """Quantize a layer so that its outputs on the calibration inputs change least.

    Args:
        weight: [O, I], any float dtype; not changed.
        hessian: [I, I] float32, ``X.T @ X`` over the inputs the layer will really see;
            not changed.
        scheme: the group size must divide I.
        scale_dtype: dtype the scales are stored in.
        drift: [I, I] float32, ``(X_float - X).T @ X``, where X_float are the inputs of
            the unquantized model; None if there is no difference to make up for.

    Raises:
        NonFiniteError: if the weight or the Hessian holds NaN or Inf.
    """
    original = weight.float()
    if not (torch.isfinite(original).all() and torch.isfinite(hessian).all()):
        raise NonFiniteError("the weight or its Hessian holds NaN or Inf")
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = diagonal.mean() if diagonal.any() else 1.0
    damped, lower, damping = _damped_cholesky(hessian)
    target = original if drift is None else original + torch.cholesky_solve((original @ drift).t(), lower).t()
    scale, zero = search_scales(target.contiguous(), diagonal, scheme, scale_dtype)
    order = torch.argsort(diagonal, descending=True, stable=True)
    codes = solve_codes(target, damped, _grid(scale, zero, scheme, original.shape[1]), order)
    scale = refit_scales(target, codes, damped, scale)
    grid = _grid(scale, zero, scheme, original.shape[1])
    codes = descend(target, codes, damped, grid, order)
    unsigned = (codes + grid.zero).to(torch.uint8)
    quantized = QuantTensor(unsigned, scale, zero, scheme)
    error = _quadratic(quantized.dequantize() - original, hessian)
    return quantized, GptqReport(damping, math.sqrt(error / max(_quadratic(original, hessian), 1e-30)), int(dead.sum()))


def solve_codes(target: Tensor, hessian: Tensor, grid: Grid, order: Tensor, *, block: int = _BLOCK) -> Tensor:
    """Round column after column, letting the columns to come make up for each error.

    Args:
        target: [O, I] float32.
        hessian: [I, I] float32, positive definite.
        order: [I] the order of the columns.
        block: columns per lazy update; changes nothing but speed.

    Returns:
        Codes less their zero points, float32 [O, I], in the columns' own order.
    """
    permuted = hessian[order][:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(permuted))
    factor = torch.linalg.cholesky(inverse, upper=True)
    rest = target[:, order].contiguous()
    codes = torch.empty_like(rest)
    columns = rest.shape[1]
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        here, corner = rest[:, start:stop].clone(), factor[start:stop, start:stop]
        errors = torch.empty_like(here)
        for i in range(stop - start):
            column = int(order[start + i])
            codes[:, start + i] = grid.round(here[:, i], column)
            errors[:, i] = (here[:, i] - codes[:, start + i] * grid.scale[:, column]) / corner[i, i]
            here[:, i + 1 :].addr_(errors[:, i], corner[i, i + 1 :], alpha=-1)
        rest[:, stop:] -= errors @ factor[start:stop, stop:]
    result = torch.empty_like(codes)
    result[:, order] = codes
    return result


def refit_scales(target: Tensor, codes: Tensor, hessian: Tensor, scale: Tensor) -> Tensor:
    """The scales [O, G] that fit given codes best, by least squares over a row's groups.

    A group whose fitted scale is not finite or changes sign keeps its old one.
    """
    rows, columns = codes.shape
    groups = scale.shape[1]
    size = columns // groups
    fitted = torch.empty(rows, groups)
    step = max(1, _REFIT_BYTES // (4 * groups * groups))
    wanted = target @ hessian
    for start in range(0, rows, step):
        part = codes[start : start + step]
        count = part.shape[0]
        normal = torch.empty(count, groups, groups)
        for group in range(groups):
            inside = slice(group * size, (group + 1) * size)
            products = (part[:, inside] @ hessian[inside]) * part
            normal[:, group] = products.view(count, groups, size).sum(-1)
        right = (part * wanted[start : start + step]).view(count, groups, size).sum(-1)
        diagonal = normal.diagonal(dim1=1, dim2=2)
        diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + 1e-20
        fitted[start : start + step] = torch.linalg.solve(normal, right)
    stored = fitted.to(scale.dtype)
    usable = torch.isfinite(stored) & (stored * scale.sign() > 0)
    return torch.where(usable, stored, scale)


def descend(target: Tensor, codes: Tensor, hessian: Tensor, grid: Grid, order: Tensor, *, block: int = 64) -> Tensor:
    """One sweep of coordinate descent: each column in turn takes its best codes given the others."""
    codes = codes.clone()
    gradient = (target - codes * grid.scale) @ hessian
    for start in range(0, order.numel(), block):
        columns = order[start : start + block]
        corner = hessian[columns][:, columns]
        here = gradient[:, columns]
        moves = torch.empty_like(here)
        for i, column in enumerate(columns.tolist()):
            scale = grid.scale[:, column]
            best = grid.round(codes[:, column] * scale + here[:, i] / corner[i, i], column)
            moves[:, i] = (best - codes[:, column]) * scale
            codes[:, column] = best
            here.addr_(moves[:, i], corner[i], alpha=-1)
        gradient -= moves @ hessian[columns]
    return codes


def _grid(scale: Tensor, zero: Tensor | None, scheme: QuantScheme, columns: int) -> Grid:
    size = columns // scale.shape[1]
    wide = scale.float().repeat_interleave(size, dim=1)
    if zero is None:
        return Grid(wide, torch.full_like(wide, scheme.levels // 2), scheme.levels - 1)
    return Grid(wide, zero.float().repeat_interleave(size, dim=1), scheme.levels - 1)


def _damped_cholesky(hessian: Tensor) -> tuple[Tensor, Tensor, float]:
    """The Hessian with as little damping as makes it positive definite, and its lower factor."""
    mean = hessian.diagonal().mean()
    damping = DAMPING
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed or damping >= _MOST_DAMPING:
            return damped, lower, damping
        damping *= 10


def _quadratic(matrix: Tensor, hessian: Tensor) -> float:
    """Trace of ``matrix @ hessian @ matrix.T``."""
    return ((matrix @ hessian) * matrix).sum(dtype=torch.float64).item()
