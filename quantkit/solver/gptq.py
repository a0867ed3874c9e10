"""GPTQ: codes that minimize a layer's output error, given the Hessian of its inputs.

Sources: GPTQ (2210.17323) with activation order over static groups; the asymmetric
calibration target of GPTAQ (2504.02692), which makes up for the error of earlier
layers; coordinate descent as in QuantEase (2309.01885). The result needs no column
order on disk.

Inside, matrices are transposed, [I, O]: the work goes input by input, over all outputs
at once.
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
DRIFT_DAMPING = 0.1
_MOST_DAMPING = 1.0
_BLOCK = 32
_REFIT_BYTES = 1 << 26


class SingularError(ArithmeticError):
    """No damping within the bound makes the Hessian positive definite."""


@dataclass(frozen=True)
class GptqReport:
    """How a layer was solved.

    Attributes:
        damping: share of the mean diagonal that was added to the Hessian.
        dead_columns: inputs that were zero throughout the calibration.
        error, energy: [O] float64: squared output error and squared output of each row.
    """

    damping: float
    dead_columns: int
    error: Tensor
    energy: Tensor

    @property
    def output_error(self) -> float:
        """Root of the mean squared output error over that of the outputs."""
        return math.sqrt(self.error.sum().item() / max(self.energy.sum().item(), 1e-30))

    def rows(self, start: int, stop: int) -> GptqReport:
        """The report on some of the rows."""
        return GptqReport(self.damping, self.dead_columns, self.error[start:stop], self.energy[start:stop])


@dataclass(frozen=True)
class Grid:
    """Where codes may lie: scale [G, O], zero point [G, O] or None, both float32, and the scheme."""

    scale: Tensor
    zero: Tensor | None
    scheme: QuantScheme
    size: int

    @classmethod
    def of(cls, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, columns: int) -> Grid:
        """The grid of stored scales and zero points."""
        return cls(scale.float(), None if zero is None else zero.float(), scheme, columns // scale.shape[0])

    def round_(self, steps: Tensor, column: int) -> Tensor:
        """The nearest codes less their zero point, in place, for one column [O] in units of its scale."""
        if self.zero is None:
            half = self.scheme.levels // 2
            return steps.round_().clamp_(-half, half - 1)
        zero = self.zero[column // self.size]
        return steps.round_().add_(zero).clamp_(0, self.scheme.levels - 1).sub_(zero)

    def values(self, codes: Tensor) -> Tensor:
        """The weights [I, O] of codes less their zero points."""
        grouped = codes.view(self.scale.shape[0], self.size, -1)
        return (grouped * self.scale.unsqueeze(1)).view_as(codes)


def compensated(weight: Tensor, hessian: Tensor, drift: Tensor) -> Tensor:
    """The weights [O, I] that on the inputs the layer will see come closest to what it should give.

    Damped more than the solver, since the drift is known from fewer inputs.

    Args:
        weight: [O, I] float32.
        hessian: [I, I] float32, ``X.T @ X`` over the inputs X that the layer will see.
        drift: [I, I] float32, ``(X_float - X).T @ X``, where X_float are the inputs of
            the unquantized model.

    Raises:
        SingularError: see `damped`.
    """
    positive, diagonal, _ = damped(hessian)
    positive.diagonal().add_(DRIFT_DAMPING * diagonal.mean())
    factor = torch.linalg.cholesky(positive)
    return weight + torch.cholesky_solve((weight @ drift).t(), factor).t()


def gptq(
    weight: Tensor, hessian: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, *, target: Tensor | None = None
) -> tuple[QuantTensor, GptqReport]:
    """Quantize a layer so that its outputs on the calibration inputs change least.

    Args:
        weight: [O, I], any float dtype; not changed.
        hessian: [I, I] float32, ``X.T @ X`` over the inputs the layer will really see;
            not changed.
        scheme: the group size must divide I.
        scale_dtype: dtype the scales are stored in.
        target: what the codes are to come close to, if not `weight`; see `compensated`.

    Raises:
        NonFiniteError: if the weight or the Hessian holds NaN or Inf.
        SingularError: see `damped`.
    """
    if not (torch.isfinite(weight).all() and torch.isfinite(hessian).all()):
        raise NonFiniteError("the weight or its Hessian holds NaN or Inf")
    original = weight.float()
    columns = original.shape[1]
    positive, diagonal, damping = damped(hessian)
    dead = int((hessian.diagonal() == 0).sum())
    wanted = (original if target is None else target.float()).t().contiguous()
    scale, zero = search_scales(wanted, diagonal, scheme, scale_dtype)
    order = torch.argsort(diagonal, descending=True, stable=True)
    codes = solve_codes(wanted, positive, Grid.of(scale, zero, scheme, columns), order)
    pull = positive @ wanted
    scale = refit_scales(pull, codes, positive, scale)
    grid = Grid.of(scale, zero, scheme, columns)
    codes = descend(pull, codes, positive, grid, order)
    del pull, positive
    offset = scheme.levels // 2 if zero is None else zero.float().repeat_interleave(grid.size, dim=0)
    unsigned = codes.add_(offset).to(torch.uint8).t().contiguous()
    quantized = QuantTensor(unsigned, scale.t().contiguous(), None if zero is None else zero.t().contiguous(), scheme)
    error = _row_energy(quantized.dequantize() - original, hessian)
    return quantized, GptqReport(damping, dead, error, _row_energy(original, hessian))


def damped(hessian: Tensor) -> tuple[Tensor, Tensor, float]:
    """A copy of the Hessian [I, I] with as little damping as makes it positive definite.

    Inputs that were always zero get the mean diagonal.

    Returns:
        The copy, its diagonal [I] before damping, and the share of its mean that was added.

    Raises:
        SingularError: if adding the whole mean diagonal is not enough.
    """
    diagonal = hessian.diagonal().clone()
    dead = diagonal == 0
    diagonal[dead] = diagonal.mean() if diagonal.any() else 1.0
    mean = diagonal.mean()
    result = hessian.clone()
    damping = DAMPING
    while True:
        result.diagonal().copy_(diagonal + damping * mean)
        if not torch.linalg.cholesky_ex(result).info:
            return result, diagonal, damping
        if damping >= _MOST_DAMPING:
            raise SingularError(f"the Hessian stays singular with {_MOST_DAMPING} of its mean diagonal added")
        damping *= 10


def solve_codes(target: Tensor, hessian: Tensor, grid: Grid, order: Tensor, *, block: int = _BLOCK) -> Tensor:
    """Round input after input, letting those to come make up for each error.

    Args:
        target: [I, O] float32.
        hessian: [I, I] float32, positive definite.
        order: [I] the order of the inputs.
        block: inputs per lazy update; changes nothing but speed.

    Returns:
        Codes less their zero points, float32 [I, O], in the inputs' own order.
    """
    factor = _inverse_factor(hessian, order)
    rest = target[order]
    codes = torch.empty_like(rest)
    sequence = order.tolist()
    for start in range(0, len(sequence), block):
        stop = min(start + block, len(sequence))
        here, corner = rest[start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(here)
        for i, column in enumerate(sequence[start:stop]):
            scale = grid.scale[column // grid.size]
            code = grid.round_(torch.div(here[i], scale, out=codes[column]), column)
            torch.addcmul(here[i], code, scale, value=-1, out=errors[i]).div_(corner[i, i])
            here[i + 1 :].addr_(corner[i, i + 1 :], errors[i], alpha=-1)
        rest[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    return codes


def refit_scales(pull: Tensor, codes: Tensor, hessian: Tensor, scale: Tensor) -> Tensor:
    """The scales [G, O] that fit given codes best, by least squares over an output's groups.

    A group whose fitted scale is not finite or changes sign keeps its old one.

    Args:
        pull: [I, O] float32, Hessian times target.
        codes: [I, O] float32, less their zero points.
        hessian: [I, I] float32, positive definite.
        scale: [G, O] the scales so far, in the dtype they are stored in.
    """
    groups, rows = scale.shape
    size = codes.shape[0] // groups
    fitted = torch.empty(groups, rows, device=codes.device)
    step = max(1, _REFIT_BYTES // (4 * groups * (groups + 3 * size)))
    for start in range(0, rows, step):
        part = codes[:, start : start + step].contiguous()
        count = part.shape[1]
        normal = torch.empty(groups, groups, count, device=codes.device)
        for group in range(groups):
            first, last = group * size, (group + 1) * size
            products = (hessian[first:, first:last] @ part[first:last]).mul_(part[first:])
            sums = products.view(groups - group, size, count).sum(1)
            normal[group:, group] = sums
            normal[group, group:] = sums
        right = (part * pull[:, start : start + step]).view(groups, size, count).sum(1)
        system = normal.permute(2, 0, 1).contiguous()
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + 1e-20
        fitted[:, start : start + step] = torch.linalg.solve(system, right.t().unsqueeze(-1)).squeeze(-1).t()
    stored = fitted.to(scale.dtype)
    usable = torch.isfinite(stored) & (stored * scale.sign() > 0)
    return torch.where(usable, stored, scale)


def descend(pull: Tensor, codes: Tensor, hessian: Tensor, grid: Grid, order: Tensor, *, block: int = _BLOCK) -> Tensor:
    """One sweep of coordinate descent: each input in turn takes its best codes given the others.

    Args:
        pull: [I, O] float32, Hessian times target.
        codes: [I, O] float32, less their zero points; not changed.
        hessian, grid, order, block: as for `solve_codes`.
    """
    codes = codes.clone()
    gradient = torch.addmm(pull, hessian, grid.values(codes), alpha=-1)
    sequence = order.tolist()
    for start in range(0, len(sequence), block):
        columns = order[start : start + block]
        corner = hessian[columns][:, columns]
        inverse = corner.diagonal().reciprocal().tolist()
        here = gradient[columns]
        moves = torch.empty_like(here)
        for i, column in enumerate(sequence[start : start + block]):
            scale, code = grid.scale[column // grid.size], codes[column]
            best = grid.round_(torch.add(code, here[i] / scale, alpha=inverse[i]), column)
            torch.sub(best, code, out=moves[i]).mul_(scale)
            code.copy_(best)
            here[i + 1 :].addr_(corner[i + 1 :, i], moves[i], alpha=-1)
        gradient.addmm_(hessian[:, columns], moves, alpha=-1)
    return codes


def _inverse_factor(hessian: Tensor, order: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of the reordered Hessian."""
    lower = torch.linalg.cholesky(hessian[order][:, order])
    inverse = torch.cholesky_inverse(lower)
    del lower
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def _row_energy(matrix: Tensor, hessian: Tensor) -> Tensor:
    """Diagonal of ``matrix @ hessian @ matrix.T``, float64."""
    return ((matrix @ hessian).mul_(matrix)).sum(1, dtype=torch.float64)
