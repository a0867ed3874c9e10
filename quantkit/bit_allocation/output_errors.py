"""How far each row of a linear would be off in each scheme, foretold from the inputs' Hessian without solving it.

GPTQ rounds inputs one after the other and lets those to come make up for each error, so of an error in input i only
what the later inputs cannot say counts: its square times the square of the input's diagonal element in the Cholesky
factor that `solve` goes by. The errors are those of the weights rounded to the scales that GPTQ would search.
Of large units some rows are tried, and stand for all by the energy of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.solver.gptq import Damped
from quantkit.solver.grid import search_scales
from quantkit.tensors.qtensor import row_chunks
from quantkit.tensors.scheme import QuantScheme

_FEWEST_ROWS = 4


@dataclass(frozen=True)
class RowErrors:
    """Of one linear, per token.

    Attributes:
        rows: the numbers of those that were tried.
        errors: squared output errors of these rows, [R], by scheme.
        energy: of all rows, [O]: what their errors are taken to be in proportion to.
    """

    rows: Tensor
    errors: Mapping[QuantScheme, Tensor]
    energy: Tensor

    def loss(self, gradients: Tensor, scheme: QuantScheme) -> float:
        """Half of the squared errors of all rows, weighted by their mean squared gradients [O]."""
        weighted = gradients.double() * self.energy.double()
        tried = weighted[self.rows].sum().item()
        if tried <= 0:
            return 0.0
        lost = (gradients[self.rows].double() * self.errors[scheme].double()).sum().item()
        return 0.5 * lost * weighted.sum().item() / tried


def conditional_variances(hessian: Damped) -> Tensor:
    """What of each input the inputs that GPTQ rounds after it do not tell, [I] float32."""
    found = torch.empty_like(hessian.diagonal)
    found[hessian.order.flip(0)] = hessian.factor.diagonal().square()
    return found


def row_errors(
    weights: Mapping[str, Tensor], hessian: Tensor, schemes: Sequence[QuantScheme], scale_dtype: torch.dtype,
    tried: Mapping[str, int],
) -> dict[str, RowErrors]:  # fmt: skip
    """The errors of linears that share their inputs.

    Args:
        weights: [O, I] float32, by module.
        hessian: [I, I] mean over tokens; used up.
        schemes: that divide the rows.
        scale_dtype: dtype the scales are stored in.
        tried: how many rows of each.

    Raises:
        NonFiniteError, SingularError: see `Damped.of_`.
    """
    damped = Damped.of_(hessian)
    variances = conditional_variances(damped)
    chosen = {module: _spread(len(weight), tried[module], weight.device) for module, weight in weights.items()}
    columns = torch.cat([weights[module][rows] for module, rows in chosen.items()]).t().contiguous()
    counts = [len(rows) for rows in chosen.values()]
    errors: dict[QuantScheme, Sequence[Tensor]] = {}
    for scheme in schemes:
        rounded = _residual(columns, damped.diagonal, scheme, scale_dtype)
        errors[scheme] = torch.split((variances @ rounded.square_()).cpu(), counts)
    return {
        module: RowErrors(
            chosen[module].cpu(), {scheme: own[number] for scheme, own in errors.items()},
            _energy(weights[module], variances).cpu(),
        )
        for number, module in enumerate(weights)
    }  # fmt: skip


def _spread(count: int, wanted: int, device: torch.device) -> Tensor:
    """Numbers of rows, evenly spread."""
    step = max(1, count // max(wanted, _FEWEST_ROWS))
    return torch.arange(0, count, step, device=device)


def _residual(columns: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype) -> Tensor:
    """How far weights [I, R] are from their rounded values in a symmetric scheme."""
    scale, _ = search_scales(columns, importance, scheme, scale_dtype)
    grouped, step = columns.view(scale.shape[0], -1, columns.shape[1]), scale.float().unsqueeze(1)
    half = scheme.levels // 2
    return (grouped / step).round_().clamp_(-half, half - 1).mul_(step).sub_(grouped).view_as(columns)


def _energy(weight: Tensor, variances: Tensor) -> Tensor:
    """The squared weights of each row, weighted as their errors are; [O]."""
    found = torch.empty(len(weight), device=weight.device)
    for start, stop in row_chunks(*weight.shape):
        found[start:stop] = weight[start:stop].square() @ variances
    return found


def rows_tried(shapes: Mapping[str, tuple[int, ...]], most: int) -> dict[str, int]:
    """How many rows of each linear of a unit are tried, so that they have about `most` weights together."""
    share = min(1.0, most / sum(math.prod(shape) for shape in shapes.values()))
    return {module: math.ceil(share * shape[0]) for module, shape in shapes.items()}
