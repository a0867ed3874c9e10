"""The cost of each scheme of each unit, for models whose own code runs: half the squared errors of
the outputs of linears, predicted from the inputs' Hessian as `losses` does.

Errors are weighted by the mean squared gradients of the linears' outputs where these are known.
Otherwise they are relative to the squares of the linear's own outputs: a linear costs as much as
another one whose outputs have the same relative error. An expert counts by its share of the tokens.

One forward pass shows the inputs of one group of linears after the other; one Hessian is in memory
at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from quantkit.base.memory import malloc_trim
from quantkit.base.progress import Progress, silent
from quantkit.bit_allocation.allocation import Unit
from quantkit.bit_allocation.losses import (
    CHOICE,
    RowErrors,
    count_tried_rows,
    estimate_row_errors,
    list_schemes,
    require_finite,
    sample_counts,
)
from quantkit.calibration.effort import batch_samples
from quantkit.formats.checkpoint import Checkpoint
from quantkit.passes.passage import Inputs, Observer, Passage, Survey
from quantkit.passes.site import Brought, gather_weights
from quantkit.passes.spill import Spill
from quantkit.tensors.products import add_square_, exact_float32, fill_lower_
from quantkit.tensors.scheme import QuantScheme


def estimate_site_losses(
    source: Checkpoint,
    passage: Passage[Any],
    survey: Survey,
    samples: Tensor,
    units: Sequence[Unit],
    schemes: Mapping[Unit, Sequence[QuantScheme]],
    *,
    memory_bytes: int,
    scale_dtype: torch.dtype,
    gradients: Mapping[str, Tensor] | None = None,
    progress: Progress = silent,
) -> list[dict[QuantScheme, float]]:
    """Estimate what each unit would cost in each of its schemes, alone, in the order of the units.

    Args:
        samples: tokens [N, T], of which the first ones are used.
        survey: how samples reach the linears of all units.
        memory_bytes: for the samples that wait within the model.
        gradients: the mean squared gradients [O] by the outputs of each linear, whose losses are
            then a KL; None makes them relative errors.

    Raises:
        NonFiniteError: if a weight of a unit, or the inputs of a linear, hold NaN or Inf.
        UnsupportedError: if the model fails.
    """
    count = sample_counts(source.config, samples.shape, memory_bytes)[0]
    batches = torch.split(samples[:count], batch_samples(source.config, samples.shape[1]))
    unit_of: dict[str, Unit] = {}
    for unit in units:
        unit_of |= dict.fromkeys(unit.modules, unit)
    groups: list[Inputs] = []
    for group in survey.groups:
        if _list_linears(group, unit_of):
            groups.append(group)
    estimation = _Estimation(source, passage, units, schemes, scale_dtype)
    arrivals = passage.iterate_inputs(groups, batches, Spill(), estimation)
    estimated = 0
    with exact_float32(), torch.no_grad(), closing(arrivals):
        for place in arrivals:
            if isinstance(place, Inputs):
                progress(CHOICE, estimated, len(groups), "layers")
                estimation.estimate_group(place, samples[:count].numel())
                estimated += 1
    progress(CHOICE, len(groups), len(groups), "layers")
    return estimation.sum_by_unit(gradients)


class _Estimation(Observer):
    """The errors of linears, while the samples pass."""

    def __init__(
        self,
        source: Checkpoint,
        passage: Passage[Any],
        units: Sequence[Unit],
        schemes: Mapping[Unit, Sequence[QuantScheme]],
        scale_dtype: torch.dtype,
    ) -> None:
        self._source = source
        self._model = passage.partwise.model
        self._units = units
        self._schemes = schemes
        self._scale_dtype = scale_dtype
        self._unit_of: dict[str, Unit] = {}
        for unit in units:
            self._unit_of |= dict.fromkeys(unit.modules, unit)
        self._tried = count_tried_rows(units)
        # Of the group that the samples have reached.
        self._hessian: Tensor | None = None
        self._tokens = 0
        self._errors: dict[str, RowErrors] = {}
        # By linear: what replaces its mean squared gradients where these are not known.
        self._relative: dict[str, float] = {}

    def arrive(self, index: int, place: Hashable, value: Any) -> None:
        """Add the inputs of a batch to the Hessian of the group that it has reached."""
        if isinstance(place, Inputs):
            self._add_inputs(value)

    def _add_inputs(self, brought: Brought) -> None:
        rows = brought.inputs.float().flatten(0, -2)
        if self._hessian is None:
            self._hessian = torch.zeros(rows.shape[1], rows.shape[1])
        if brought.shares is not None:
            rows = rows * brought.shares.unsqueeze(-1)
        self._tokens += len(rows)
        if len(rows):
            add_square_(self._hessian, rows.t().contiguous())

    def estimate_group(self, group: Inputs, all_tokens: int) -> None:
        """Estimate the errors of the linears of a group that all batches have reached.

        Args:
            all_tokens: of all batches, of which an expert gets some.
        """
        assert self._hessian is not None
        hessian = self._hessian
        fill_lower_(hessian)
        # An expert that got no token may get some of another text.
        share = max(1, self._tokens) / all_tokens
        hessian.div_(max(1, self._tokens))
        self._hessian = None
        self._tokens = 0
        gathered = gather_weights(group.sites, self._unit_of, self._model.get_parameter)
        weights = {linear: weight.float() for linear, weight in gathered.items()}
        require_finite(weights, self._source.path)
        for linear, weight in weights.items():
            squares = _mean_squares(weight, hessian, self._tried[linear])
            if squares > 0:
                self._relative[linear] = share / (squares * len(weight))
            else:
                self._relative[linear] = 0.0
        linear_units = [self._unit_of[linear] for linear in weights]
        self._errors |= estimate_row_errors(
            weights,
            hessian,
            list_schemes(linear_units, self._schemes),
            self._scale_dtype,
            self._tried,
            self._source.path,
        )
        malloc_trim()

    def sum_by_unit(self, gradients: Mapping[str, Tensor] | None) -> list[dict[QuantScheme, float]]:
        """Sum the losses of the linears of each unit, in each scheme."""
        losses: list[dict[QuantScheme, float]] = []
        for unit in self._units:
            unit_losses: dict[QuantScheme, float] = dict.fromkeys(self._schemes[unit], 0.0)
            for linear in unit.modules:
                errors = self._errors[linear]
                if gradients is None:
                    squares = torch.full((len(errors.energy),), self._relative[linear])
                else:
                    squares = gradients[linear]
                for scheme in unit_losses:
                    unit_losses[scheme] += errors.loss(squares, scheme)
            losses.append(unit_losses)
        return losses


def _list_linears(group: Inputs, linears: Mapping[str, Unit]) -> list[str]:
    """List the linears of a group that are in units."""
    listed: list[str] = []
    for site in group.sites:
        for linear, _, _ in site.rows:
            if linear in linears:
                listed.append(linear)
    return listed


def _mean_squares(weight: Tensor, hessian: Tensor, count: int) -> float:
    """Compute the mean square of the outputs of a weight [O, I], from about `count` of its rows."""
    rows = weight[:: max(1, len(weight) // count)]
    return ((rows @ hessian) * rows).sum(1).mean().item()
