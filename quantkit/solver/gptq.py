"""GPTQ: codes that minimize a layer's output error, given the Hessian of its inputs.

Sources: GPTQ (2210.17323) with activation order over static groups; the asymmetric calibration
target of GPTAQ (2504.02692), which compensates the error of earlier layers; coordinate descent as
in QuantEase (2309.01885); feedback between outputs, where it is known how they add up, as in YAQA
(2505.22988). The result needs no column order on disk. Rounding uses the Cholesky factor of the
Hessian itself, with its inputs in reverse order, instead of that of its inverse: the codes are the
same (2507.18553).

Internally, matrices are transposed, [I, O]: columns are processed one by one, for all rows
together. Factors are upper triangular, so that most operations multiply parts of their rows, which
are contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from quantkit.errors import NonFiniteError
from quantkit.solver.block_grid import refit_blocks, search_blocks
from quantkit.solver.columns import TORCH, ColumnKernels, descend, solve_codes
from quantkit.solver.grid import ENDLESS, Grid, weights_at_once
from quantkit.solver.refit import refit_scales
from quantkit.solver.two_sided import OUTPUT_DAMPING, OutputFactor, solve_two_sided
from quantkit.tensors import code_table, float_codes
from quantkit.tensors.products import times
from quantkit.tensors.qtensor import QuantTensor, concatenate_rows, quantize_rtn
from quantkit.tensors.scheme import Codes, QuantScheme, Scales

# Shares of the mean diagonal.
DAMPING = 0.01
_MAX_DAMPING = 1.0
# Of a triangular factor: most steps are matrix products, which are fast.
BLOCK_SIZE = 512
# Into which a product with a triangular factor is cut: more of them skip more zeros.
_STRIPS = 8


class SingularError(ArithmeticError):
    """No damping within the bound makes the Hessian positive definite."""


@dataclass(frozen=True)
class GptqReport:
    """The result of solving a layer.

    Attributes:
        damping: share of the mean diagonal that was added to the Hessian.
        dead_columns: inputs that were zero in all calibration samples.
        error, energy: [O] float64: for each row, the squared error of its outputs, and the squared
            outputs, both relative to the target.
    """

    damping: float
    dead_columns: int
    error: Tensor
    energy: Tensor

    @property
    def output_error(self) -> float:
        """Compute the root of the mean squared output error over that of the outputs."""
        # All outputs of a layer may be zero.
        return math.sqrt(self.error.sum().item() / max(self.energy.sum().item(), 1e-30))

    def rows(self, start: int, stop: int) -> GptqReport:
        """Return the report for a range of rows."""
        return GptqReport(
            self.damping, self.dead_columns, self.error[start:stop], self.energy[start:stop]
        )

    def merge_rows(self, rows: Tensor, other: GptqReport) -> GptqReport:
        """Combine the rows for which a mask [O] is true with another report's rows of the same
        layer.
        """
        error = torch.where(rows, self.error, other.error)
        energy = torch.where(rows, self.energy, other.energy)
        return GptqReport(self.damping, self.dead_columns, error, energy)


@dataclass(frozen=True)
class Damped:
    """A Hessian with the smallest damping that makes it positive definite.

    Attributes:
        matrix: [I, I] float32.
        diagonal: [I] its diagonal without damping; the mean where an input was always zero.
        damping: share of the mean of `diagonal` that was added.
        dead: number of inputs that were always zero.
        order: [I] the inputs in the order of rounding, the largest diagonal first.
        factor: of `matrix`, see `reverse_factor`.
    """

    matrix: Tensor
    diagonal: Tensor
    damping: float
    dead: int
    order: Tensor
    factor: Tensor

    @classmethod
    def of_(cls, hessian: Tensor, min_damping: float = DAMPING) -> Damped:
        """Damp a Hessian [I, I] in place.

        Raises:
            NonFiniteError: if it holds NaN or Inf.
            SingularError: if neither the whole mean diagonal nor `min_damping` times it is enough.
        """
        if not torch.isfinite(hessian).all():
            raise NonFiniteError("the Hessian holds NaN or Inf")
        stored = hessian.diagonal()
        dead = stored == 0
        # Weights of dead inputs are multiplied by zeros only: any positive number will do.
        diagonal = torch.where(dead, torch.where(dead.all(), 1.0, stored.mean()), stored)
        mean = diagonal.mean()
        order = torch.argsort(diagonal, descending=True, stable=True)
        damping = min_damping
        while True:
            hessian.diagonal().copy_(diagonal + damping * mean)
            factor = reverse_factor(hessian, order)
            if factor is not None:
                return cls(hessian, diagonal, damping, int(dead.sum()), order, factor)
            if damping >= _MAX_DAMPING:
                raise SingularError(
                    f"the Hessian stays singular with {damping:g} of its mean diagonal added"
                )
            damping = min(10 * damping, _MAX_DAMPING)

    def divide(self, right: Tensor) -> Tensor:
        """Compute ``right @ matrix^-1``, [N, I] float32.

        With ``right = weight @ (X_float - X).T @ X``, for the inputs X of this Hessian, which the
        layer will get, and X_float of the unquantized model, it is the change of the weights [O, I]
        that brings the outputs closest to those of the unquantized model.
        """
        inputs = self.order.flip(0)
        result = torch.empty_like(right)
        result[:, inputs] = solve_factored(self.factor, right.t()[inputs]).t()
        return result


def solve(
    weight: Tensor,
    hessian: Damped,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    *,
    target: Tensor | None = None,
    kernels: ColumnKernels = TORCH,
    start: QuantTensor | None = None,
    output_factor: OutputFactor | None = None,
) -> tuple[QuantTensor, GptqReport]:
    """Quantize a layer so that its outputs on the calibration inputs change least.

    Args:
        weight: [O, I], any float dtype; not changed.
        hessian: of ``X.T @ X`` over the inputs that the layer will get; not changed.
        scheme: the group size must divide I.
        scale_dtype: dtype the scales are stored in.
        target: the weights [O, I] to approximate, if not `weight`; see `Damped.divide`.
        kernels: for the device.
        start: the weight rounded to nearest, for schemes in small floats: its scales are kept.
        output_factor: how errors of different outputs add up, for schemes whose scales are floats;
            see `two_sided`. If that is not known, all outputs count alike. Not changed.

    Raises:
        NonFiniteError: if the weight holds NaN or Inf.
    """
    if not torch.isfinite(weight).all():
        raise NonFiniteError("the weight holds NaN or Inf")
    rows, columns = weight.shape
    # A process has no rows where there are more processes than rows.
    if rows == 0:
        if start is None:
            start = quantize_rtn(weight.new_zeros(1, columns), scheme, scale_dtype)
        sums = torch.zeros(0, dtype=torch.float64, device=weight.device)
        return start.rows(0, 0), GptqReport(hessian.damping, hessian.dead, sums, sums)
    step = max(1, weights_at_once(weight.device) // columns)
    bounds = [*range(0, rows, step), rows]
    # Feedback between outputs refits the scales: it covers only integers with float scales.
    if start is not None or scheme.scales is not Scales.FLOATS:
        output_factor = None
    if output_factor is not None:
        bounds = output_factor.bounds
    if target is None:
        target = weight
    parts = []
    errors = []
    energies = []
    for number, (first, last) in enumerate(pairwise(bounds)):
        # float32 for some rows at a time only.
        rows_target = target[first:last].float().t().contiguous()
        if output_factor is not None:
            output_block = output_factor.blocks[number]
            solution = _solve_two_sided(
                rows_target, hessian, output_block, scheme, scale_dtype, kernels
            )
        elif start is not None:
            solution = _solve_small_floats(rows_target, hessian, start.rows(first, last), kernels)
        elif scheme.scales is Scales.FLOATS:
            solution = _solve_on_float_scales(rows_target, hessian, scheme, scale_dtype, kernels)
        else:
            solution = _solve_blocks(rows_target, hessian, scheme, kernels)
        part, error, energy = solution
        parts.append(part)
        errors.append(error)
        energies.append(energy)
    report = GptqReport(hessian.damping, hessian.dead, torch.cat(errors), torch.cat(energies))
    return concatenate_rows(parts), report


def _solve_on_float_scales(
    target: Tensor,
    hessian: Damped,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    kernels: ColumnKernels,
) -> tuple[QuantTensor, Tensor, Tensor]:
    """Solve some rows of a layer for targets [I, O]; return the weight, and the error and energy of
    each row.
    """
    scale, zero = kernels.search_scales(target, hessian.diagonal, scheme, scale_dtype)
    grid = Grid.of(scale, zero, scheme, len(target))
    codes, whitened = solve_codes(target, hessian.factor, grid, hessian.order, kernels)
    # The factor's transpose times whitened errors is the Hessian times errors, in half the work.
    gradient = torch.empty_like(whitened)
    gradient[hessian.order.flip(0)] = upper_transposed_times(hessian.factor, whitened)
    loss = whitened.square_().sum(0, dtype=torch.float64)
    # The largest tensors of the solver are freed as soon as possible.
    del whitened
    scale, gain, explained = refit_scales(gradient, codes, hessian.matrix, scale)
    del gradient
    energy = loss + explained
    loss -= gain
    grid = Grid.of(scale, zero, scheme, len(target))
    codes, gain = descend(target, codes, hessian.matrix, grid, hessian.order, kernels)
    loss -= gain
    # What damping has added counts as no error of outputs.
    added = hessian.matrix.diagonal() - hessian.diagonal
    error = loss.sub_(added @ grid.values(codes).sub_(target).square_()).clamp_(min=0)
    energy.sub_(added @ target.square()).clamp_(min=0)
    return _build_weight(codes, scale, zero, scheme, grid.size), error, energy


def _solve_two_sided(
    target: Tensor,
    input_damped: Damped,
    output_block: Tensor,
    scheme: QuantScheme,
    scale_dtype: torch.dtype,
    kernels: ColumnKernels,
) -> tuple[QuantTensor, Tensor, Tensor]:
    """Solve rows as `_solve_on_float_scales`, given how their outputs add up: the factor [O, O] of
    these.
    """
    searched_scale, zero = kernels.search_scales(target, input_damped.diagonal, scheme, scale_dtype)
    output_damped = Damped.of_(output_block.clone(), OUTPUT_DAMPING)
    codes, scale = solve_two_sided(
        target, input_damped, output_damped, searched_scale, zero, scheme, kernels
    )
    del output_damped
    grid = Grid.of(scale, zero, scheme, len(target))
    error, energy = _errors(grid.values(codes).sub_(target), target, input_damped)
    return _build_weight(codes, scale, zero, scheme, grid.size), error, energy


def _build_weight(
    codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, size: int
) -> QuantTensor:
    """Build the weight [O, I] of codes [I, O] less their zero points, with scales and zero points
    [G, O].
    """
    if zero is None:
        unsigned = codes + scheme.levels // 2
    else:
        unsigned = codes + zero.float().repeat_interleave(size, dim=0)
        zero = zero.t().contiguous()
    unsigned = unsigned.to(torch.uint8).t().contiguous()
    return QuantTensor(unsigned, scale.t().contiguous(), zero, scheme)


def _solve_small_floats(
    target: Tensor, hessian: Damped, start: QuantTensor, kernels: ColumnKernels
) -> tuple[QuantTensor, Tensor, Tensor]:
    """Solve rows as `_solve_on_float_scales` for small floats, on the scales of `start`."""
    kind = start.scheme.codes
    steps = start.steps.t().contiguous()
    grid = Grid(
        torch.where(steps == 0, ENDLESS, steps), None, start.scheme, len(target) // len(steps)
    )
    values, _ = solve_codes(target, hessian.factor, grid, hessian.order, kernels)
    values, _ = descend(target, values, hessian.matrix, grid, hessian.order, kernels)
    codes = float_codes.encode_values(values.t().contiguous(), kind)
    error, energy = _errors(grid.values(values).sub_(target), target, hessian)
    return replace(start, codes=codes), error, energy


def _errors(missing: Tensor, target: Tensor, hessian: Damped) -> tuple[Tensor, Tensor]:
    """Compute the squared error of the outputs of each row, and the squared outputs, for weights
    [I, O] less their targets.
    """
    # What damping has added counts as no error of outputs.
    added = hessian.matrix.diagonal() - hessian.diagonal

    def sum_squared_outputs(weights: Tensor) -> Tensor:
        squares = times(hessian.matrix, weights).mul_(weights).sum(0, dtype=torch.float64)
        # Rounding can make the difference negative.
        return (squares - added @ weights.square()).clamp_(min=0)

    return sum_squared_outputs(missing), sum_squared_outputs(target)


def _solve_blocks(
    target: Tensor, hessian: Damped, scheme: QuantScheme, kernels: ColumnKernels
) -> tuple[QuantTensor, Tensor, Tensor]:
    """Solve rows as `_solve_on_float_scales` for blocks of GGUF.

    The float16 scales are fitted to the codes; their integers stay.
    """
    scales = search_blocks(target, hessian.diagonal, scheme, kernels.search_scales)
    grid = Grid.of_blocks(scales, scheme, len(target))
    codes, _ = solve_codes(target, hessian.factor, grid, hessian.order, kernels)
    gradient = times(hessian.matrix, target - grid.values(codes))

    def refit(basis: Tensor, factors: Tensor) -> Tensor:
        result, _, _ = refit_scales(gradient, basis, hessian.matrix, factors)
        # The minima are fitted after the scales, to what these leave.
        change = (result.float() - factors.float()).repeat_interleave(len(basis) // len(factors), 0)
        gradient.sub_(times(hessian.matrix, change.mul_(basis)))
        return result

    scales = refit_blocks(codes, scales, refit)
    grid = Grid.of_blocks(scales, scheme, len(target))
    codes, _ = descend(target, codes, hessian.matrix, grid, hessian.order, kernels)
    error, energy = _errors(grid.values(codes).sub_(target), target, hessian)
    if scheme.codes is Codes.TABLE:
        unsigned = code_table.find_nearest(codes)
    elif scheme.symmetric:
        unsigned = (codes + scheme.levels // 2).to(torch.uint8)
    else:
        unsigned = codes.to(torch.uint8)
    return QuantTensor.of_blocks(unsigned.t().contiguous(), scales, scheme), error, energy


def reverse_factor(hessian: Tensor, order: Tensor) -> Tensor | None:
    """Compute the upper triangular U with ``H = U.T @ U``, where H is the Hessian with its inputs
    in reverse order; None if it is not positive definite.
    """
    inputs = order.flip(0)
    return cholesky(hessian[inputs.unsqueeze(1), inputs])


def cholesky(matrix: Tensor) -> Tensor | None:
    """Compute the upper triangular U with ``matrix = U.T @ U``, [N, N]; None if the matrix is not
    positive definite. The matrix is overwritten; only its upper triangle is read.
    """
    if matrix.device.type != "cpu":
        factor, info = torch.linalg.cholesky_ex(matrix, upper=True)
        return None if info else factor
    size = len(matrix)
    for start in range(0, size, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, size)
        if start:
            matrix[start:stop, start:].sub_(
                times(matrix[:start, start:stop].t(), matrix[:start, start:])
            )
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
    """Solve ``factor.T @ factor @ X = right`` for X [N, O], with an upper triangular factor
    [N, N].
    """
    result = right.clone()
    identity = torch.eye(BLOCK_SIZE, dtype=factor.dtype, device=factor.device)
    # The inverses of the blocks on the diagonal, so that all other steps are products.
    blocks = []
    for start in range(0, len(factor), BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, len(factor))
        corner = factor[start:stop, start:stop]
        identity_corner = identity[: len(corner), : len(corner)]
        inverse = torch.linalg.solve_triangular(corner, identity_corner, upper=True)
        blocks.append((start, stop, inverse))
    # Forwards with the factor's transpose, then backwards with the factor.
    for start, stop, inverse in blocks:
        if start:
            result[start:stop].sub_(times(factor[:start, start:stop].t(), result[:start]))
        result[start:stop] = times(inverse.t(), result[start:stop])
    for start, stop, inverse in reversed(blocks):
        if stop < len(factor):
            result[start:stop].sub_(times(factor[start:stop, stop:], result[stop:]))
        result[start:stop] = times(inverse, result[start:stop])
    return result


def upper_transposed_times(factor: Tensor, right: Tensor) -> Tensor:
    """Multiply ``factor.T @ right`` for an upper triangular factor [N, N] and [N, O]."""
    result = torch.empty_like(right)
    step = max(BLOCK_SIZE, -(-len(factor) // _STRIPS))
    for start in range(0, len(factor), step):
        stop = min(start + step, len(factor))
        result[start:stop] = times(factor[:stop, start:stop].t(), right[:stop])
    return result
