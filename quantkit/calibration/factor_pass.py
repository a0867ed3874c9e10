"""Measure how errors of the outputs of linears add up, for `quantkit.solver.two_sided`, by one
backward pass.

Gradients are those of the float model, by the outputs of linears that share their inputs, all
together. The factors of all blocks wait in the activation store for the solver, which needs them in
the opposite order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quantkit.base.progress import Progress, in_phase, silent
from quantkit.calibration.effort import FACTOR_ROWS, GRADIENTS
from quantkit.calibration.output_factors import OutputFactors
from quantkit.calibration.output_gradients import GradientPass, list_linears, select_groups
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import UnsupportedError
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.passage import Inputs, Passage
from quantkit.tensors.finite import all_finite
from quantkit.tensors.products import add_square_, fill_lower_

NOISE = 4.0
"""Mean diagonals that are added for one token an output. From few tokens products of gradients are
mostly noise: on SmolLM2-135M, with 4 to 5 tokens an output, KL was 6 % higher than without them
with a tenth of the mean diagonal added, and 5 % lower with all of it.
"""


def measure_factors(
    passage: Passage[Any],
    groups: Sequence[Inputs],
    samples: Tensor,
    linear_names: Collection[str],
    store: ActivationStore,
    *,
    samples_at_once: int,
    head_layers: int,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> tuple[OutputFactors, str | None]:
    """Measure the factors of linears from one forward and one backward pass.

    There are none of experts, whose tokens the router weights, and none at all if the model's
    outputs are not finite, or gradients cannot go back through it.

    Args:
        groups: the products that have the same inputs, in the order in which samples reach them.
        samples: tokens [N, T]; each of several processes runs its share of these.
        linear_names: the linears, as the rows of sites name them.
        samples_at_once: of the samples that go through the model as a batch.
        head_layers: how many blocks take as long as the product with the head.

    Returns:
        The factors, and the reason why there are none; None if the pass was complete.
    """
    factors = OutputFactors(store)
    groups_by_part = select_groups(passage.partwise, groups, linear_names, with_experts=False)
    # Nothing to measure, so no pass.
    if not groups_by_part:
        return factors, None
    # A process without samples would not meet the others at the blocks.
    if len(samples) < group.size:
        group = SINGLE
    gradient_pass = GradientPass(passage, samples, samples_at_once, head_layers, group, store)
    device: torch.device = group.device or passage.partwise.device

    def make_sums(part: str) -> FactorSums:
        linears = [list_linears(sites) for sites in groups_by_part.get(part, ())]
        return FactorSums(linears, device, samples.numel(), group, factors)

    try:
        # The solver reports values that are not finite, so the pass only measures nothing then.
        gradient_pass.run(groups_by_part, make_sums, in_phase(progress, GRADIENTS))
    except UnsupportedError as error:
        return OutputFactors(store), error.problem
    return factors, None


class FactorSums:
    """The factors of a block, while gradients come in linear by linear."""

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        device: torch.device,
        tokens: int,
        processes: ProcessGroup,
        factors: OutputFactors,
    ) -> None:
        """
        Args:
            groups: the linears, by full name, that share their inputs.
            tokens: of all samples.
            processes: add up their sums.
            factors: gets the sums in the end.
        """
        self._tokens = tokens
        self._processes = processes
        self._factors = factors
        self._groups = groups
        self._of = {name: names for names in groups for name in names}
        self._rows: dict[str, int] = {}
        self._blocks: dict[str, list[Tensor]] = {}
        self._waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
        self._device = device

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradients [N, O] by the outputs of a linear; first, for each linear, those of no
        token.
        """
        if name not in self._of:
            return
        self._rows[name] = gradient.shape[1]
        if not len(gradient):
            return
        names = self._of[name]
        waiting = self._waiting[names[0]]
        waiting[name] = gradient
        if len(waiting) == len(names):
            columns = torch.cat([waiting[one] for one in names], 1).t().contiguous()
            waiting.clear()
            for block, (start, stop) in zip(
                self._sums(names), pairwise(_bounds(len(columns))), strict=True
            ):
                add_square_(block, columns[start:stop])

    def _sums(self, names: Sequence[str]) -> list[Tensor]:
        """Return the blocks that are summed for a group."""
        if names[0] not in self._blocks:
            bounds = _bounds(sum(self._rows[name] for name in names))
            sizes = [stop - start for start, stop in pairwise(bounds)]
            self._blocks[names[0]] = [
                torch.zeros(size, size, device=self._device) for size in sizes
            ]
        return self._blocks[names[0]]

    def release(self) -> None:
        """Keep the sums over all processes as factors; they are no longer here."""
        for names in self._groups:
            blocks = self._sums(names)
            start = 0
            rows = {}
            for name in names:
                rows[name] = slice(start, start + self._rows[name])
                start += self._rows[name]
            for block in blocks:
                self._processes.sum_(block)
                fill_lower_(block)
                block.diagonal().add_(block.diagonal().mean() * NOISE * len(block) / self._tokens)
            if all(map(all_finite, blocks)):
                self._factors.keep(rows, blocks)
        self._blocks.clear()


def _bounds(count: int) -> list[int]:
    """Return where blocks of outputs begin, of about one size, and the number of outputs."""
    parts = -(-count // FACTOR_ROWS)
    return [count * number // parts for number in range(parts + 1)]
