"""Measure how errors of the outputs of products add up, as `quantkit.calibration.factor_pass`, in a
model whose own code runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.base.progress import Progress, Stretches, in_phase, silent
from quantkit.calibration.activation_store import ActivationStore
from quantkit.calibration.effort import GRADIENTS
from quantkit.calibration.factor_pass import FactorSums
from quantkit.calibration.fisher import TURN, differentiate_head
from quantkit.calibration.output_factors import OutputFactors
from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.errors import UnsupportedError
from quantkit.passes.block_calls import begin_graph
from quantkit.passes.block_passes import BlockPasses
from quantkit.passes.partwise_model import PartwiseModel
from quantkit.passes.passage import Inputs, Passage
from quantkit.passes.site import Site
from quantkit.tensors.finite import all_finite


def measure_site_factors(
    passage: Passage[Any],
    groups: Sequence[Inputs],
    samples: Tensor,
    linear_names: Collection[str],
    store: ActivationStore,
    *,
    samples_at_once: int,
    group: ProcessGroup = SINGLE,
    progress: Progress = silent,
) -> tuple[OutputFactors, str | None]:
    """Measure the factors of linears, as `measure_factors`, of a model whose own code runs.

    There are none of experts, and none at all if the model's outputs are not finite, or gradients
    cannot go back through it.

    Args:
        groups: the products that have the same inputs, from `Passage.survey`.
        linear_names: the linears, as the rows of sites name them.
        samples_at_once: of the samples that go through the model as a batch.

    Returns:
        The factors, and the reason why there are none; None if the pass was complete.
    """
    factors = OutputFactors(store)
    groups_by_part = _select_sites(passage.partwise, groups, linear_names)
    # Nothing to measure, so no pass.
    if not groups_by_part:
        return factors, None
    # A process without samples would not meet the others at the blocks.
    if len(samples) < group.size:
        group = SINGLE
    measuring = _SiteFactors(passage, samples, store, samples_at_once, group, progress)
    try:
        measuring.run(groups_by_part, factors)
    except UnsupportedError as error:
        measuring.close()
        return OutputFactors(store), error.problem
    return factors, None


def _select_sites(
    partwise: PartwiseModel, groups: Sequence[Inputs], linear_names: Collection[str]
) -> dict[str, list[tuple[Site, ...]]]:
    """Select the groups of products in blocks that have factors, by part."""
    groups_by_part: dict[str, list[tuple[Site, ...]]] = defaultdict(list)
    for group in groups:
        part = partwise.part_of(group.sites[0].module)
        # Gradients by the outputs of the head, for example, are not followed.
        if part is None or not partwise.is_listed(part):
            continue
        # The tokens of experts are weighted by the router.
        if any(site.expert is not None for site in group.sites):
            continue
        linears = {linear for site in group.sites for linear, _, _ in site.rows}
        if not linears.isdisjoint(linear_names):
            groups_by_part[part].append(group.sites)
    return groups_by_part


class _Failed(UnsupportedError):
    """Another process could not go on."""


class _SiteFactors:
    """The passes of `measure_site_factors`."""

    def __init__(
        self,
        passage: Passage[Any],
        samples: Tensor,
        store: ActivationStore,
        samples_at_once: int,
        group: ProcessGroup,
        progress: Progress,
    ) -> None:
        self._passage = passage
        self._tokens = samples.numel()
        self._share = group.share(len(samples))
        self._batches = torch.split(samples[self._share], samples_at_once)
        self._passes = BlockPasses(passage, self._batches, store=store)
        self._group = group
        self._device: torch.device = group.device or passage.partwise.device
        self._progress = in_phase(progress, GRADIENTS)

    def run(
        self, groups_by_part: Mapping[str, list[tuple[Site, ...]]], factors: OutputFactors
    ) -> None:
        """Run both passes, and keep the factors of the wanted groups of products, by part.

        Raises:
            UnsupportedError: if gradients cannot go back through the model.
        """
        parts = self._passage.partwise.parts
        blocks = sum(self._passage.partwise.is_listed(part) for part in parts)
        # The head takes about as long as a block.
        stretches = Stretches(self._progress, 2 * blocks + TURN)
        with self._meet():
            states = self._passes.forward(groups_by_part, progress=stretches.next(blocks))
        failed = torch.tensor([float(not all(map(all_finite, states)))], device=self._device)
        # The solver reports values that are not finite, so this only measures nothing.
        self._group.sum_(failed)
        if failed.any():
            self._passes.close()
            return
        with self._meet():
            self._turn(states, stretches.next(TURN))
            # They would be in memory during the backward pass.
            del states

        @contextmanager
        def open_block(part: str) -> Iterator[None]:
            sums = FactorSums(
                [_list_linears(sites) for sites in groups_by_part.get(part, ())],
                self._device,
                self._tokens,
            )
            sites = [site for group in groups_by_part.get(part, ()) for site in group]
            with self._meet(), _hook_outputs(self._passage.partwise.model, sites, sums):
                yield
            sums.release(self._group, factors)

        self._passes.backward(open_block, progress=stretches.next(blocks))

    def close(self) -> None:
        """Free what the passes keep."""
        self._passes.close()

    def _turn(self, states: list[Tensor], progress: Progress) -> None:
        """Run the gradients of the log probabilities of drawn tokens back to the last block."""
        total = sum(batch.numel() for batch in self._batches)
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress(GRADIENTS, done, total, "layers")

        first = self._share.start
        gradients: list[Tensor] = []
        with self._passage.open_head() as compute_logits:
            for batch_states in states:
                gradients.append(differentiate_head(batch_states, compute_logits, first, advance))
                first += len(batch_states)
        self._passes.turn(gradients)

    @contextmanager
    def _meet(self) -> Iterator[None]:
        """Let all processes go on after a step only if it has succeeded in all of them."""
        problem: UnsupportedError | None = None
        try:
            yield
        except UnsupportedError as error:
            problem = error
        failed = torch.tensor([float(problem is not None)], device=self._device)
        self._group.sum_(failed)
        if problem is not None:
            raise problem
        if failed.any():
            raise _Failed("gradients cannot go back through the model in another process")


def _list_linears(sites: Sequence[Site]) -> list[str]:
    """List the linears of products that have the same input, in the order of their outputs."""
    names: list[str] = []
    for site in sites:
        for linear, _, _ in site.rows:
            names.append(linear)
    return names


@contextmanager
def _hook_outputs(model: nn.Module, sites: Sequence[Site], sums: FactorSums) -> Iterator[None]:
    """Add gradients by the outputs of products to sums, as they come."""

    def add(site: Site, gradient: Tensor) -> None:
        rows = gradient.flatten(0, -2)
        for linear, start, stop in site.rows:
            sums.add(linear, rows[:, start:stop])

    def hook_output(site: Site, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not output.requires_grad:
            # The first block has neither inputs nor weights that require gradients. A copy, because
            # the model's code may write to it.
            output = output.clone()
            begin_graph([output])
        output.register_hook(partial(add, site))  # type: ignore[no-untyped-call]
        return output

    handles: list[Any] = []
    for site in sites:
        outputs = max(stop for _, _, stop in site.rows)
        # So that linears that no gradient reaches have rows too.
        add(site, torch.zeros(0, outputs))
        module = model.get_submodule(site.module)
        handles.append(module.register_forward_hook(partial(hook_output, site)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
