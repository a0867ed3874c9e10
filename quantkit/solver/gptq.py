"""GPTQ: codes that minimize a layer's output error, given the Hessian of its inputs.

Sources: GPTQ (2210.17323) with activation order over static groups; the asymmetric
calibration target of GPTAQ (2504.02692), which makes up for the error of earlier
layers; coordinate descent as in QuantEase (2309.01885). The result needs no column
order on disk. Rounding goes by the Cholesky factor of the Hessian itself, its inputs in reverse order, rather than by
that of its inverse: the codes are the same (2507.18553).

Inside, matrices are transposed, [I, O]: the work goes input by input, over all outputs
at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import NonFiniteError
from quantkit.solver.factor import cholesky, solve_upper, solve_upper_transposed, upper_times
from quantkit.solver.grid import Grid, search_scales
from quantkit.solver.panels import ColumnKernels, descend_in_panels, solve_in_panels
from quantkit.solver.portions import refit_bytes, weights_at_once
from quantkit.tensors.products import times
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

DAMPING = 0.01
_MOST_DAMPING = 1.0
_BLOCK = 64


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
class Damped:
    """A Hessian with as little damping as makes it positive definite.

    Attributes:
        matrix: [I, I] float32.
        diagonal: [I] its diagonal before; the mean where an input was always zero.
        damping: share of the mean of `diagonal` that was added.
        dead: number of inputs that were always zero.
        order: [I] the inputs, the largest first, as they are rounded.
        factor: of `matrix`, see `reverse_factor`.
    """

    matrix: Tensor
    diagonal: Tensor
    damping: float
    dead: int
    order: Tensor
    factor: Tensor

    @classmethod
    def of_(cls, hessian: Tensor, least: float = DAMPING) -> Damped:
        """Damp a Hessian [I, I] in place.

        Raises:
            NonFiniteError: if it holds NaN or Inf.
            SingularError: if adding the whole mean diagonal is not enough.
        """
        if not torch.isfinite(hessian).all():
            raise NonFiniteError("the Hessian holds NaN or Inf")
        stored = hessian.diagonal()
        dead = stored == 0
        diagonal = torch.where(dead, torch.where(dead.all(), 1.0, stored.mean()), stored)
        mean = diagonal.mean()
        order = torch.argsort(diagonal, descending=True, stable=True)
        damping = least
        while True:
            hessian.diagonal().copy_(diagonal + damping * mean)
            factor = reverse_factor(hessian, order)
            if factor is not None:
                return cls(hessian, diagonal, damping, int(dead.sum()), order, factor)
            if damping >= _MOST_DAMPING:
                raise SingularError(f"the Hessian stays singular with {damping:g} of its mean diagonal added")
            damping = min(10 * damping, _MOST_DAMPING)


def compensated(weight: Tensor, hessian: Damped, pull: Tensor) -> Tensor:
    """The weights [O, I] that on the inputs the layer will see come closest to what it should give.

    Args:
        weight: [O, I] float32.
        hessian: ``X.T @ X`` over inputs X that the layer will see.
        pull: [O, I] float32, ``weight @ (X_float - X).T @ X`` over the same, where X_float
            are the inputs of the unquantized model.
    """
    inputs = hessian.order.flip(0)
    solved = solve_upper(hessian.factor, solve_upper_transposed(hessian.factor, pull.t()[inputs]))
    moved = torch.empty_like(weight)
    moved[:, inputs] = solved.t()
    return moved.add_(weight)


def gptq(
    weight: Tensor, hessian: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype, *, target: Tensor | None = None,
    kernels: ColumnKernels | None = None,
) -> tuple[QuantTensor, GptqReport]:  # fmt: skip
    """Quantize a layer so that its outputs on the calibration inputs change least.

    Args:
        weight: [O, I], any float dtype; not changed.
        hessian: [I, I] float32, ``X.T @ X`` over the inputs the layer will really see;
            not changed.
        scheme, scale_dtype, target, kernels: as for `solve`.

    Raises:
        NonFiniteError: if the weight or the Hessian holds NaN or Inf.
        SingularError: see `Damped.of_`.
    """
    return solve(weight, Damped.of_(hessian.clone()), scheme, scale_dtype, target=target, kernels=kernels)


def solve(
    weight: Tensor, hessian: Damped, scheme: QuantScheme, scale_dtype: torch.dtype, *, target: Tensor | None = None,
    kernels: ColumnKernels | None = None,
) -> tuple[QuantTensor, GptqReport]:  # fmt: skip
    """`gptq` with a Hessian that is damped already.

    Args:
        weight: [O, I], any float dtype; not changed.
        hessian: not changed.
        scheme: the group size must divide I.
        scale_dtype: dtype the scales are stored in.
        target: what the codes are to come close to, if not `weight`; see `compensated`.
        kernels: of the device; None leaves each input to torch.

    Raises:
        NonFiniteError: if the weight holds NaN or Inf.
    """
    if not torch.isfinite(weight).all():
        raise NonFiniteError("the weight holds NaN or Inf")
    rows, columns = weight.shape
    step = max(1, weights_at_once(weight.device) // columns)
    parts = []
    for start in range(0, max(rows, 1), step):
        part = weight[start : start + step].float()
        wanted = part if target is None else target[start : start + step].float()
        parts.append(_solve_rows(part, wanted, hessian, scheme, scale_dtype, kernels))
    codes, scales, zeros, errors, energies = zip(*parts, strict=True)
    quantized = QuantTensor(torch.cat(codes), torch.cat(scales), None if scheme.symmetric else torch.cat(zeros), scheme)
    return quantized, GptqReport(hessian.damping, hessian.dead, torch.cat(errors), torch.cat(energies))


def _solve_rows(
    weight: Tensor, target: Tensor, hessian: Damped, scheme: QuantScheme, scale_dtype: torch.dtype,
    kernels: ColumnKernels | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Some rows [O, I] of a layer: codes, scale, zero point, and the row's error and energy."""
    wanted = target.t().contiguous()
    scale, zero = search_scales(wanted, hessian.diagonal, scheme, scale_dtype)
    grid = Grid.of(scale, zero, scheme, len(wanted))
    if kernels is None:
        codes = solve_codes(wanted, hessian.factor, grid, hessian.order)
    else:
        codes = solve_in_panels(wanted, hessian.factor, grid, hessian.order, kernels)
    pull = times(hessian.matrix, wanted)
    scale = refit_scales(pull, codes, hessian.matrix, scale)
    grid = Grid.of(scale, zero, scheme, len(wanted))
    if kernels is None:
        codes = descend(pull, codes, hessian.matrix, grid, hessian.order)
    else:
        codes = descend_in_panels(pull, codes, hessian.matrix, grid, hessian.order, kernels)
    offset = scheme.levels // 2 if zero is None else zero.float().repeat_interleave(grid.size, dim=0)
    unsigned = (codes + offset).to(torch.uint8).t().contiguous()
    scale, zero = scale.t().contiguous(), None if zero is None else zero.t().contiguous()
    error = _row_energy(QuantTensor(unsigned, scale, zero, scheme).dequantize() - weight, hessian)
    return unsigned, scale, zero, error, _row_energy(weight, hessian)


def solve_codes(target: Tensor, factor: Tensor, grid: Grid, order: Tensor, *, block: int = _BLOCK) -> Tensor:
    """Round input after input, letting those to come make up for each error.

    Args:
        target: [I, O] float32.
        factor: [I, I] float32, see `reverse_factor`.
        order: [I] the order of the inputs.
        block: inputs per lazy update; changes nothing but speed.

    Returns:
        Codes less their zero points, float32 [I, O], in the inputs' own order.
    """
    wanted = target[order.flip(0)]  # the first to round is the last, as in the factor
    errors, codes = torch.empty_like(wanted), torch.empty_like(wanted)
    sequence = order.tolist()
    for stop in range(len(sequence), 0, -block):
        start = max(0, stop - block)
        corner = (factor[start:stop, start:stop] / factor.diagonal()[start:stop].unsqueeze(1)).t()
        here = wanted[start:stop].clone()
        if stop < len(sequence):
            made_up = times(factor[start:stop, stop:], errors[stop:])
            here.add_(made_up.div_(factor.diagonal()[start:stop].unsqueeze(1)))
        for i in reversed(range(stop - start)):
            column = sequence[len(sequence) - 1 - (start + i)]
            scale = grid.scale[column // grid.size]
            code = grid.round_(torch.div(here[i], scale, out=codes[column]), column)
            torch.addcmul(wanted[start + i], code, scale, value=-1, out=errors[start + i])
            here[:i].addr_(corner[i, :i], errors[start + i])
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
    step = max(1, refit_bytes(codes.device) // (4 * groups * (groups + 3 * size)))
    for start in range(0, rows, step):
        part = codes[:, start : start + step].contiguous()
        count = part.shape[1]
        normal = torch.empty(groups, groups, count, device=codes.device)
        for group in range(groups):
            first, last = group * size, (group + 1) * size
            products = times(hessian[first:, first:last], part[first:last]).mul_(part[first:])
            sums = products.view(groups - group, size, count).sum(1)
            normal[group:, group] = sums
            normal[group, group:] = sums
        right = (part * pull[:, start : start + step]).view(groups, size, count).sum(1)
        system = normal.permute(2, 0, 1).contiguous()
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + 1e-20
        fitted[:, start : start + step] = torch.linalg.solve_ex(system, right.t().unsqueeze(-1))[0].squeeze(-1).t()
    stored = fitted.to(scale.dtype)
    usable = torch.isfinite(stored) & (stored * scale.sign() > 0)
    return torch.where(usable, stored, scale)


def descend(pull: Tensor, codes: Tensor, hessian: Tensor, grid: Grid, order: Tensor, *, block: int = _BLOCK) -> Tensor:
    """One sweep of coordinate descent: each input in turn takes its best codes given the others.

    Args:
        pull: [I, O] float32, Hessian times target.
        codes: [I, O] float32, less their zero points; not changed.
        hessian: [I, I] float32, positive definite.
        grid, order, block: as for `solve_codes`.
    """
    codes = codes.clone()
    values = grid.values(codes)
    sequence = order.tolist()
    for start in range(0, len(sequence), block):
        columns = order[start : start + block]
        rows = hessian[columns]
        corner = rows[:, columns]
        inverse = corner.diagonal().reciprocal().tolist()
        here = pull[columns].sub_(times(rows, values))
        for i, column in enumerate(sequence[start : start + block]):
            scale, code = grid.scale[column // grid.size], codes[column]
            best = grid.round_(torch.add(code, here[i] / scale, alpha=inverse[i]), column)
            move = torch.sub(best, code).mul_(scale)
            torch.mul(best, scale, out=values[column])
            code.copy_(best)
            here[i + 1 :].addr_(corner[i + 1 :, i], move, alpha=-1)
    return codes


def reverse_factor(hessian: Tensor, order: Tensor) -> Tensor | None:
    """The upper triangular U with ``H = U.T @ U``, where H is the Hessian with its inputs in reverse order; None if it
    is not positive definite."""
    inputs = order.flip(0)
    return cholesky(hessian[inputs.unsqueeze(1), inputs])


def _row_energy(matrix: Tensor, hessian: Damped) -> Tensor:
    """Diagonal of ``matrix @ H @ matrix.T`` for the Hessian H before it was damped, [O] float64."""
    whole = upper_times(hessian.factor, matrix.t()[hessian.order.flip(0)]).square_().sum(0, dtype=torch.float64)
    added = hessian.matrix.diagonal() - hessian.diagonal
    return (whole - (matrix.square() @ added).double()).clamp_(min=0)
