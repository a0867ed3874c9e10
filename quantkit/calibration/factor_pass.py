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

import torch
from torch import Tensor

from quantkit.architectures.topology import count_head_layers, input_groups
from quantkit.base.memory import malloc_trim
from quantkit.base.progress import Progress, Stretches, in_phase, silent
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.effort import FACTOR_ROWS, GRADIENTS, has_factor
from quantkit.calibration.fisher import TURN, FisherPasses
from quantkit.calibration.output_factors import OutputFactors
from quantkit.distributed.group import ProcessGroup
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.load import BLOCK_PREFIX
from quantkit.tensors.finite import all_finite
from quantkit.tensors.products import add_square_, fill_lower_

NOISE = 4.0
"""Mean diagonals that are added for one token an output. From few tokens products of gradients are
mostly noise: on SmolLM2-135M, with 4 to 5 tokens an output, KL was 6 % higher than without them
with a tenth of the mean diagonal added, and 5 % lower with all of it.
"""


def measure_factors(
    source: Checkpoint,
    samples: Tensor,
    linear_names: Collection[str],
    store: ActivationStore,
    *,
    device: torch.device,
    group: ProcessGroup,
    first_layer: int = 0,
    progress: Progress = silent,
) -> OutputFactors:
    """Return the factors of the linears `wanted`, by full name, from one forward and one backward
    pass.

    There are none of experts, whose tokens the router weights, and none at all if the model's
    outputs are not finite.

    Args:
        samples: tokens [N, T]; each of several processes runs its share of these.
        first_layer: where the backward pass ends.
    """
    factors = OutputFactors(store)
    layers = source.config.num_layers
    share = group.share(len(samples))
    passes = FisherPasses(source, samples[share], len(samples[share]), device, store=store)
    head = TURN * count_head_layers(source.config)
    total = 2 * layers - first_layer + head
    for layer in range(layers):
        progress(GRADIENTS, layer, total, "layers")
        passes.forward(layer, with_sums=False)
        malloc_trim()
    failed = torch.tensor([float(not passes.is_finite())], device=device)
    group.sum_(failed)
    if failed.any():
        return factors
    stretches = Stretches(in_phase(progress, GRADIENTS), total)
    stretches.next(layers)
    passes.turn(share.start, stretches.next(head))
    for layer in reversed(range(first_layer, layers)):
        progress(GRADIENTS, head + 2 * layers - layer - 1, total, "layers")
        sums = FactorSums(_select_groups(source, layer, linear_names), device, samples.numel())
        passes.backward(layer, sums.add)
        sums.release(group, factors)
        malloc_trim()
    progress(GRADIENTS, total, total, "layers")
    return factors


def _select_groups(
    source: Checkpoint, layer: int, linear_names: Collection[str]
) -> list[list[str]]:
    """Select the groups of a block that have factors, and some of whose linears are wanted."""
    prefix = BLOCK_PREFIX.format(layer)
    groups: list[list[str]] = []
    for group in input_groups(source.config, layer):
        names = [prefix + module for module in group.modules]
        is_solved = not set(names).isdisjoint(linear_names)
        if is_solved and has_factor(source.config, layer, group.branch):
            groups.append(names)
    return groups


class FactorSums:
    """The factors of a block, while gradients come in linear by linear."""

    def __init__(self, groups: Sequence[Sequence[str]], device: torch.device, tokens: int) -> None:
        """
        Args:
            groups: the linears, by full name, that share their inputs.
            tokens: of all samples.
        """
        self._tokens = tokens
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

    def release(self, group: ProcessGroup, factors: OutputFactors) -> None:
        """Keep the sums over all processes, which this no longer holds."""
        for names in self._groups:
            blocks = self._sums(names)
            start = 0
            rows = {}
            for name in names:
                rows[name] = slice(start, start + self._rows[name])
                start += self._rows[name]
            for block in blocks:
                group.sum_(block)
                fill_lower_(block)
                block.diagonal().add_(block.diagonal().mean() * NOISE * len(block) / self._tokens)
            if all(map(all_finite, blocks)):
                factors.keep(rows, blocks)
        self._blocks.clear()


def _bounds(count: int) -> list[int]:
    """Return where blocks of outputs begin, of about one size, and the number of outputs."""
    parts = -(-count // FACTOR_ROWS)
    return [count * number // parts for number in range(parts + 1)]
