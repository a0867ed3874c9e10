"""The cost of each scheme of each unit in KL(source || quantized) per token, estimated on
calibration samples.

KL grows with the square of changes: a change dY of a linear's outputs costs half the mean of ``(g .
dY) ** 2``, where g is the gradient, by these outputs, of the log probability of a token that the
model itself draws (its Fisher information). Outputs are assumed to be independent, so a linear
costs half the sum over its rows of their mean squared gradients times their mean squared errors;
see `quantkit.bit_allocation.row_errors`.

Some models let no gradients pass. Then errors are relative to the squares of the linear's own
outputs: a linear costs as much as another one whose outputs have the same relative error, and an
expert counts by its share of the tokens.

One forward pass shows the inputs of one group of linears after the other, with one Hessian in
memory at a time; a second one and a backward pass sum the squares of the gradients. One block's
weights are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.topology import count_head_layers
from quantkit.base.memory import malloc_trim
from quantkit.base.progress import Progress, Stretches, in_phase, silent
from quantkit.bit_allocation.allocation import Measure, Unit
from quantkit.bit_allocation.choice_costs import CHOICE, sample_counts
from quantkit.bit_allocation.row_errors import (
    RowErrors,
    count_tried_rows,
    estimate_row_errors,
    list_schemes,
    require_finite,
)
from quantkit.calibration.effort import batch_samples
from quantkit.calibration.head_gradients import TURN
from quantkit.calibration.output_gradients import GradientPass, list_linears, select_groups
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.passage import Inputs, Observer, Passage
from quantkit.passes.site import Brought, gather_weights
from quantkit.tensors.products import add_square_, exact_float32, fill_lower_
from quantkit.tensors.scheme import QuantScheme


@dataclass(frozen=True)
class Losses:
    """What units would cost.

    Attributes:
        measure: what the losses estimate.
        by_unit: the loss of each scheme of each unit, alone.
    """

    measure: Measure
    by_unit: Sequence[Mapping[QuantScheme, float]]


def estimate_losses(
    source: Checkpoint,
    passage: Passage[Any],
    groups: Sequence[Inputs],
    samples: Tensor,
    units: Sequence[Unit],
    schemes: Mapping[Unit, Sequence[QuantScheme]],
    *,
    memory_bytes: int,
    scale_dtype: torch.dtype,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> Losses:
    """Estimate what each unit would cost in each of its schemes.

    Args:
        passage: the source, which samples pass through.
        groups: its linears, by shared input, in the order in which samples reach them.
        samples: tokens [N, T], of which the first ones are used; each of several processes runs its
            share of these.
        memory_bytes: for the activations.

    Raises:
        NonFiniteError: if a weight of a unit, or the inputs of a linear, hold NaN or Inf.
        UnsupportedError: if the model fails.
    """
    config = source.config
    for_hessians, for_gradients = sample_counts(config, samples.shape, memory_bytes)
    # A process without samples would not meet the others at the blocks.
    if min(for_hessians, for_gradients) < group.size:
        group = SINGLE
    unit_of: dict[str, Unit] = {}
    for unit in units:
        unit_of |= dict.fromkeys(unit.modules, unit)
    used_groups: list[Inputs] = []
    for inputs in groups:
        if not unit_of.keys().isdisjoint(list_linears(inputs.sites)):
            used_groups.append(inputs)
    gradient_layers = 2 * config.num_layers + TURN * count_head_layers(config)
    total = config.num_layers + gradient_layers
    stretches = Stretches(in_phase(progress, CHOICE), total)
    estimation = _estimate_errors(
        _Estimation(source, passage, units, schemes, scale_dtype, group),
        used_groups,
        samples[:for_hessians],
        stretches.next(config.num_layers),
    )
    gradient_pass = GradientPass(
        passage,
        samples[:for_gradients],
        batch_samples(config, samples.shape[1]),
        count_head_layers(config),
        group,
    )
    squares = measure_gradient_squares(
        gradient_pass, used_groups, unit_of.keys(), stretches.next(gradient_layers)
    )
    # Also where gradients cannot pass.
    progress(CHOICE, total, total, "layers")
    if squares is None:
        return Losses("relative error", _sum_by_unit(units, schemes, estimation, None))
    return Losses("KL", _sum_by_unit(units, schemes, estimation, squares))


def measure_gradient_squares(
    gradient_pass: GradientPass,
    groups: Sequence[Inputs],
    linears: Collection[str],
    progress: Progress = silent,
) -> dict[str, Tensor] | None:
    """Measure the mean squared gradients [O] by the outputs of some linears, over all tokens; None
    if the gradients of any of them are not known.
    """
    partwise = gradient_pass.passage.partwise
    groups_by_part = select_groups(partwise, groups, linears, with_experts=True)
    squares: dict[str, Tensor] = {}
    device: torch.device = gradient_pass.group.device or partwise.device

    def make_sums(part: str) -> _SquareSums:
        return _SquareSums(squares, device, gradient_pass.group)

    try:
        is_finite = gradient_pass.run(groups_by_part, make_sums, progress)
    except UnsupportedError:
        return None
    if not is_finite or not squares.keys() >= set(linears):
        return None
    tokens = gradient_pass.samples.numel()
    return {linear: total.cpu() / tokens for linear, total in squares.items()}


class _SquareSums:
    """Sums of the squares of gradients by the outputs of the linears of a block."""

    def __init__(
        self, squares: dict[str, Tensor], device: torch.device, processes: ProcessGroup
    ) -> None:
        """
        Args:
            squares: gets the sums [O] over all processes, by linear.
        """
        self._squares = squares
        self._device = device
        self._processes = processes
        self._sums: dict[str, Tensor] = {}

    def add(self, linear: str, gradient: Tensor) -> None:
        """Add gradients [N, O]."""
        if linear not in self._sums:
            self._sums[linear] = torch.zeros(gradient.shape[1], device=self._device)
        if len(gradient):
            self._sums[linear].add_(gradient.square().sum(0))

    def release(self) -> None:
        """Add up the sums of all processes."""
        for linear, total in self._sums.items():
            self._processes.sum_(total)
            self._squares[linear] = total


def _estimate_errors(
    estimation: _Estimation, groups: Sequence[Inputs], samples: Tensor, progress: Progress
) -> _Estimation:
    """Let samples [N, T] pass the linears of some groups, and estimate the errors of these."""
    source = estimation.source
    group = estimation.group
    batches = torch.split(
        samples[group.share(len(samples))], batch_samples(source.config, samples.shape[1])
    )
    arrivals = estimation.passage.iterate_inputs(groups, batches, ActivationStore(), estimation)
    estimated = 0
    with exact_float32(), torch.no_grad(), closing(arrivals):
        for place in arrivals:
            if isinstance(place, Inputs):
                progress(CHOICE, estimated, len(groups), "layers")
                estimation.estimate_group(place, samples.numel())
                estimated += 1
    return estimation


class _Estimation(Observer):
    """The errors of linears, while the samples pass.

    Attributes:
        errors: by linear.
        relative: by linear: what replaces its mean squared gradients where these are not known.
    """

    def __init__(
        self,
        source: Checkpoint,
        passage: Passage[Any],
        units: Sequence[Unit],
        schemes: Mapping[Unit, Sequence[QuantScheme]],
        scale_dtype: torch.dtype,
        group: ProcessGroup,
    ) -> None:
        self.source = source
        self.passage = passage
        self.group = group
        self._schemes = schemes
        self._scale_dtype = scale_dtype
        self._unit_of: dict[str, Unit] = {}
        for unit in units:
            self._unit_of |= dict.fromkeys(unit.modules, unit)
        self._tried = count_tried_rows(units)
        # Of the group that the samples have reached.
        self._hessian: Tensor | None = None
        self._tokens = 0
        self.errors: dict[str, RowErrors] = {}
        self.relative: dict[str, float] = {}

    def arrive(self, index: int, place: Hashable, value: Any) -> None:
        """Add the inputs of a batch to the Hessian of the group that it has reached."""
        if isinstance(place, Inputs):
            self._add_inputs(value)

    def _add_inputs(self, brought: Brought) -> None:
        rows = brought.inputs.float().flatten(0, -2)
        if self._hessian is None:
            self._hessian = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
        if brought.shares is not None:
            rows = rows * brought.shares.flatten().unsqueeze(-1)
        self._tokens += len(rows)
        if len(rows):
            add_square_(self._hessian, rows.t().contiguous())

    def estimate_group(self, group: Inputs, all_tokens: int) -> None:
        """Estimate the errors of the linears of a group that all batches have reached.

        Args:
            all_tokens: of all batches of all processes, of which an expert gets some.
        """
        assert self._hessian is not None
        hessian = self._hessian
        count = torch.tensor([float(self._tokens)], device=hessian.device)
        self._hessian = None
        self._tokens = 0
        self.group.sum_(hessian)
        self.group.sum_(count)
        # Only one triangle of the symmetric Hessian was summed.
        fill_lower_(hessian)
        # An expert that got no token may get some of another text.
        tokens = max(1, int(count.item()))
        hessian.div_(tokens)
        parameter_of = self.passage.partwise.model.get_parameter
        gathered = gather_weights(group.sites, self._unit_of, parameter_of)
        weights = {linear: weight.float() for linear, weight in gathered.items()}
        require_finite(weights, self.source.path)
        for linear, weight in weights.items():
            mean_square = _mean_squares(weight, hessian, self._tried[linear])
            self.relative[linear] = 0.0
            if mean_square > 0:
                self.relative[linear] = tokens / all_tokens / (mean_square * len(weight))
        linear_units = [self._unit_of[linear] for linear in weights]
        self.errors |= estimate_row_errors(
            weights,
            hessian,
            list_schemes(linear_units, self._schemes),
            self._scale_dtype,
            self._tried,
            self.source.path,
        )
        malloc_trim()


def _sum_by_unit(
    units: Sequence[Unit],
    schemes: Mapping[Unit, Sequence[QuantScheme]],
    estimation: _Estimation,
    squares: Mapping[str, Tensor] | None,
) -> list[dict[QuantScheme, float]]:
    """Sum the losses of the linears of each unit, in each scheme.

    Args:
        squares: the mean squared gradients [O] by the outputs of each linear; None makes losses
            relative errors.
    """
    losses: list[dict[QuantScheme, float]] = []
    for unit in units:
        unit_losses: dict[QuantScheme, float] = dict.fromkeys(schemes[unit], 0.0)
        # Linears are assumed to be independent.
        for linear in unit.modules:
            errors = estimation.errors[linear]
            if squares is None:
                weights_of_rows = torch.full((len(errors.energy),), estimation.relative[linear])
            else:
                weights_of_rows = squares[linear]
            for scheme in unit_losses:
                unit_losses[scheme] += errors.loss(weights_of_rows, scheme)
        losses.append(unit_losses)
    return losses


def _mean_squares(weight: Tensor, hessian: Tensor, count: int) -> float:
    """Compute the mean square of the outputs of a weight [O, I], from about `count` of its rows."""
    rows = weight[:: max(1, len(weight) // count)]
    return ((rows @ hessian) * rows).sum(1).mean().item()
