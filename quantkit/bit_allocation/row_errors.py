"""The errors of the outputs of linears that are rounded, predicted from their inputs' Hessian
without solving it.

GPTQ rounds inputs one after the other, and later inputs compensate each error. Only the part that
they cannot compensate counts: the error's square times the square of the input's diagonal element
in the Cholesky factor that `solve` uses. The errors are those of weights rounded to the scales that
GPTQ would search. In large units only some rows are rounded, and extrapolated to all rows by the
energy of the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.base.messages import Message, Option
from quantkit.bit_allocation.allocation import Unit
from quantkit.errors import NonFiniteError
from quantkit.solver.block_grid import search_blocks
from quantkit.solver.gptq import Damped, SingularError
from quantkit.solver.grid import search_scales
from quantkit.tensors.finite import all_finite
from quantkit.tensors.qtensor import QuantTensor, nearest_codes, row_chunks
from quantkit.tensors.scheme import QuantScheme, Scales

# About how many weights of a unit are rounded to estimate its losses.
_WEIGHTS_TRIED = 1 << 18
# Rows of a linear that are rounded at least.
_MIN_ROWS = 4


def count_trial_weights(
    units: Sequence[Unit], options: Sequence[Sequence[QuantScheme]]
) -> Counter[QuantScheme]:
    """Count the weights that are rounded in each scheme to estimate its losses, given the
    schemes of each unit.
    """
    counts = Counter[QuantScheme]()
    for unit, schemes in zip(units, options, strict=True):
        for scheme in schemes:
            counts[scheme] += min(unit.weights, _WEIGHTS_TRIED)
    return counts


def count_tried_rows(units: Sequence[Unit]) -> dict[str, int]:
    """Count the rows of each linear that are rounded, by module."""
    tried: dict[str, int] = {}
    for unit in units:
        share = min(1.0, _WEIGHTS_TRIED / unit.weights)
        for parameter in unit.parameters:
            tried[parameter.module] = math.ceil(share * parameter.shape[0])
    return tried


def require_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise a `NonFiniteError` for a weight, given by module, that holds NaN or Inf."""
    for module, weight in weights.items():
        if not all_finite(weight):
            raise NonFiniteError(
                f"tensor '{module}.weight' contains NaN or Inf",
                path=path,
                hint=(
                    Message(
                        "it cannot be quantized; repair the source, or ",
                        Option("keep", value=module),
                        " leaves it unquantized",
                    )
                ),
            )


def list_schemes(
    units: Sequence[Unit], schemes: Mapping[Unit, Sequence[QuantScheme]]
) -> list[QuantScheme]:
    """List all schemes that any of some units may have."""
    listed: list[QuantScheme] = []
    for unit in units:
        for scheme in schemes[unit]:
            if scheme not in listed:
                listed.append(scheme)
    return listed


def estimate_row_errors(
    weights: Mapping[str, Tensor],
    hessian: Tensor,
    schemes: Sequence[QuantScheme],
    scale_dtype: torch.dtype,
    tried: Mapping[str, int],
    path: Path,
) -> dict[str, RowErrors]:
    """Estimate the errors of linears that share their inputs, as `row_errors`, whatever their
    Hessian is. Raises `NonFiniteError` for one that holds NaN or Inf.
    """
    try:
        return row_errors(weights, hessian, schemes, scale_dtype, tried)
    except SingularError:
        # Without a usable Hessian, all inputs count equally, and none compensates another.
        identity = torch.eye(len(hessian), device=hessian.device)
        return row_errors(weights, identity, schemes, scale_dtype, tried)
    except NonFiniteError as error:
        raise NonFiniteError(
            f"linear '{next(iter(weights))}': {error.problem}", path=path
        ) from error


@dataclass(frozen=True)
class RowErrors:
    """The errors of one linear, per token: the indices of the rows that were rounded, their squared
    output errors, [R], by scheme, and the energy of all rows, [O], to which errors are assumed to
    be proportional.
    """

    rows: Tensor
    errors: Mapping[QuantScheme, Tensor]
    energy: Tensor

    def loss(self, gradients: Tensor, scheme: QuantScheme) -> float:
        """Estimate half the squared errors of all rows, weighted by their mean squared gradients
        [O].
        """
        weighted = gradients.double() * self.energy.double()
        tried = weighted[self.rows].sum().item()
        if tried <= 0:
            return 0.0
        lost = (gradients[self.rows].double() * self.errors[scheme].double()).sum().item()
        # Extrapolated from the rows that were rounded to all rows, by their weighted energy.
        return 0.5 * lost * weighted.sum().item() / tried


def _round_columns(
    columns: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
) -> Tensor:
    """Round weights [I, O] to the scales that GPTQ would search."""
    if scheme.scales is not Scales.FLOATS:
        scales = search_blocks(columns, importance, scheme, search_scales)
        rows = columns.t()
        grouped_rows = rows.reshape(len(rows), scheme.groups(len(columns)), -1)
        codes = nearest_codes(grouped_rows, scales, scheme)
        return QuantTensor.of_blocks(codes, scales, scheme).dequantize().t().contiguous()
    scale, _ = search_scales(columns, importance, scheme, scale_dtype)
    grouped = columns.view(scale.shape[0], -1, columns.shape[1])
    step = scale.float().unsqueeze(1)
    # The candidates with float scales are symmetric.
    half = scheme.levels // 2
    return (grouped / step).round_().clamp_(-half, half - 1).mul_(step).view_as(columns)


def row_errors(
    weights: Mapping[str, Tensor],
    hessian: Tensor,
    schemes: Sequence[QuantScheme],
    scale_dtype: torch.dtype,
    tried: Mapping[str, int],
) -> dict[str, RowErrors]:
    """Estimate the errors of linears that share their inputs.

    Args:
        weights: [O, I] float32, by module.
        hessian: [I, I] mean over tokens; overwritten.
        schemes: with groups that divide the rows.
        tried: how many rows of each are rounded.

    Raises:
        NonFiniteError, SingularError: see `Damped.of_`.
    """
    damped = Damped.of_(hessian)
    # The variance of each input, given those that GPTQ rounds after it: they compensate the rest of
    # its error. The Cholesky factor is in GPTQ's order, reversed.
    variances = torch.empty_like(damped.diagonal)
    variances[damped.order.flip(0)] = damped.factor.diagonal().square()
    rows_tried: dict[str, Tensor] = {}
    weights_tried: list[Tensor] = []
    counts: list[int] = []
    for module, weight in weights.items():
        stride = max(1, len(weight) // max(tried[module], _MIN_ROWS))
        rows = torch.arange(0, len(weight), stride, device=weight.device)
        rows_tried[module] = rows
        weights_tried.append(weight[rows])
        counts.append(len(rows))
    # One matrix of all linears, so that each scheme searches its scales once.
    columns = torch.cat(weights_tried).t().contiguous()
    split_errors: dict[QuantScheme, Sequence[Tensor]] = {}
    for scheme in schemes:
        residual = _round_columns(columns, damped.diagonal, scheme, scale_dtype).sub_(columns)
        split_errors[scheme] = torch.split((variances @ residual.square_()).cpu(), counts)
    errors_of_linears: dict[str, RowErrors] = {}
    for number, (module, weight) in enumerate(weights.items()):
        energies: list[Tensor] = []
        # In chunks, because the squares are another copy of the weights.
        for start, stop in row_chunks(*weight.shape):
            energies.append(weight[start:stop].square() @ variances)
        errors: dict[QuantScheme, Tensor] = {}
        for scheme, linear_errors in split_errors.items():
            errors[scheme] = linear_errors[number]
        energy = torch.cat(energies).cpu()
        errors_of_linears[module] = RowErrors(rows_tried[module].cpu(), errors, energy)
    return errors_of_linears
