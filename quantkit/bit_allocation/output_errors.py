"""The output errors of a linear's rows in each scheme, predicted from the inputs' Hessian without solving it.

GPTQ rounds inputs one after the other, and later inputs compensate each error. Only the part that they cannot
compensate counts: the error's square times the square of the input's diagonal element in the Cholesky factor that
`solve` uses. The errors are those of weights rounded to the scales that GPTQ would search.
In large units only some rows are rounded, and extrapolated to all rows by the energy of the weights.
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

_MIN_ROWS = 4


@dataclass(frozen=True)
class RowErrors:
    """The errors of one linear, per token.

    Attributes:
        rows: the indices of the rows that were rounded.
        errors: squared output errors of these rows, [R], by scheme.
        energy: of all rows, [O]; errors are assumed to be proportional to it.
    """

    rows: Tensor
    errors: Mapping[QuantScheme, Tensor]
    energy: Tensor

    def loss(self, gradients: Tensor, scheme: QuantScheme) -> float:
        """Half the squared errors of all rows, weighted by their mean squared gradients [O]."""
        weighted = gradients.double() * self.energy.double()
        tried = weighted[self.rows].sum().item()
        if tried <= 0:
            return 0.0
        lost = (gradients[self.rows].double() * self.errors[scheme].double()).sum().item()
        return 0.5 * lost * weighted.sum().item() / tried


def row_errors(
    weights: Mapping[str, Tensor], hessian: Tensor, schemes: Sequence[QuantScheme], scale_dtype: torch.dtype,
    tried: Mapping[str, int],
) -> dict[str, RowErrors]:  # fmt: skip
    """The errors of linears that share their inputs.

    Args:
        weights: [O, I] float32, by module.
        hessian: [I, I] mean over tokens; overwritten.
        schemes: with groups that divide the rows.
        scale_dtype: dtype the scales are stored in.
        tried: how many rows of each are rounded.

    Raises:
        NonFiniteError, SingularError: see `Damped.of_`.
    """
    damped = Damped.of_(hessian)
    variances = torch.empty_like(damped.diagonal)  # of each input, given those that GPTQ rounds after it
    variances[damped.order.flip(0)] = damped.factor.diagonal().square()
    chosen = {}
    for module, weight in weights.items():
        stride = max(1, len(weight) // max(tried[module], _MIN_ROWS))
        chosen[module] = torch.arange(0, len(weight), stride, device=weight.device)
    columns = torch.cat([weights[module][rows] for module, rows in chosen.items()]).t().contiguous()
    counts = [len(rows) for rows in chosen.values()]
    errors: dict[QuantScheme, Sequence[Tensor]] = {}
    for scheme in schemes:
        scale, _ = search_scales(columns, damped.diagonal, scheme, scale_dtype)
        grouped, step = columns.view(scale.shape[0], -1, columns.shape[1]), scale.float().unsqueeze(1)
        half = scheme.levels // 2  # schemes are symmetric
        residual = (grouped / step).round_().clamp_(-half, half - 1).mul_(step).sub_(grouped).view_as(columns)
        errors[scheme] = torch.split((variances @ residual.square_()).cpu(), counts)
    found = {}
    for number, (module, weight) in enumerate(weights.items()):
        parts = [weight[start:stop].square() @ variances for start, stop in row_chunks(*weight.shape)]
        own = {scheme: of_scheme[number] for scheme, of_scheme in errors.items()}
        found[module] = RowErrors(chosen[module].cpu(), own, torch.cat(parts).cpu())
    return found


def rows_tried(shapes: Mapping[str, tuple[int, ...]], max_weights: int) -> dict[str, int]:
    """How many rows of each linear of a unit are rounded, so that they have about `max_weights` weights together."""
    share = min(1.0, max_weights / sum(math.prod(shape) for shape in shapes.values()))
    return {module: math.ceil(share * shape[0]) for module, shape in shapes.items()}
