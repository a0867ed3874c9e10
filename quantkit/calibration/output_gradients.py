"""Gradients by the outputs of products, of the log probability of tokens that the model draws (its
Fisher information), from one forward and one backward pass.

One block's weights are in memory at a time; see `quantkit.passes.block_passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit.base.progress import Progress, Stretches, silent
from quantkit.calibration.head_gradients import TURN, differentiate_head
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import UnsupportedError
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.block_calls import begin_graph
from quantkit.passes.block_passes import BlockPasses
from quantkit.passes.partwise_model import PartwiseModel
from quantkit.passes.passage import Inputs, Passage
from quantkit.passes.site import Brought, Site
from quantkit.tensors.finite import all_finite

SiteGroup = tuple[Site, ...]
"""Products that have the same inputs."""


class OutputSums(Protocol):
    """What is made of the gradients by the outputs of the linears of a block."""

    def add(self, linear: str, gradient: Tensor) -> None:
        """Add gradients [N, O] by outputs of a linear; first, for each linear, those of no token.
        An expert whose tokens end gets no more.
        """
        ...

    def release(self) -> None:
        """Finish, after the gradients of all tokens were added."""
        ...


@dataclass(frozen=True)
class GradientPass:
    """A forward and a backward pass of samples.

    Attributes:
        passage: what they pass through.
        samples: tokens [N, T]; each of several processes runs its share of them.
        samples_at_once: of the samples that go through the model as a batch.
        head_layers: how many blocks take as long as the product with the head.
        group: the processes.
        store: keeps the inputs of blocks up to the backward pass; None is memory.
    """

    passage: Passage[Any]
    samples: Tensor
    samples_at_once: int
    head_layers: int
    group: ProcessGroup
    store: ActivationStore | None = None

    def run(
        self,
        groups_by_part: Mapping[str, Sequence[SiteGroup]],
        make_sums: Callable[[str], OutputSums],
        progress: Progress = silent,
    ) -> bool:
        """Run both passes, and add the gradients by the outputs of some products to sums.

        Args:
            groups_by_part: the products, by block.
            make_sums: makes the sums of a block.

        Returns:
            Whether the states after the last block are finite; otherwise there are no gradients.

        Raises:
            UnsupportedError: if gradients cannot go back through the model, in all processes.
        """
        share = self.group.share(len(self.samples))
        batches = torch.split(self.samples[share], self.samples_at_once)
        passes = BlockPasses(self.passage, batches, store=self.store, to_inputs=True)
        try:
            return self._run(passes, share.start, groups_by_part, make_sums, progress)
        finally:
            passes.close()

    def _run(
        self,
        passes: BlockPasses,
        first_sample: int,
        groups_by_part: Mapping[str, Sequence[SiteGroup]],
        make_sums: Callable[[str], OutputSums],
        progress: Progress,
    ) -> bool:
        partwise = self.passage.partwise
        blocks = sum(partwise.is_listed(part) for part in partwise.parts)
        head = TURN * self.head_layers
        stretches = Stretches(progress, 2 * blocks + head)
        with self._meet():
            states = passes.forward(groups_by_part, progress=stretches.next(blocks))
        failed = self._make_flag(not all(map(all_finite, states)))
        self.group.sum_(failed)
        if failed.any():
            return False
        with self._meet():
            passes.turn(self._differentiate_head(states, first_sample, stretches.next(head)))
        # They would be in memory during the backward pass.
        del states

        @contextmanager
        def open_block(part: str) -> Iterator[None]:
            sums = make_sums(part)
            sites = [site for group in groups_by_part.get(part, ()) for site in group]
            with self._meet(), _hook_outputs(partwise, sites, sums):
                yield
            sums.release()

        passes.backward(open_block, progress=stretches.next(blocks))
        return True

    def _differentiate_head(
        self, states: list[Tensor], first_sample: int, progress: Progress
    ) -> list[Tensor]:
        """Compute the gradients of the log probabilities of drawn tokens by the states."""
        total = sum(batch.shape[0] * batch.shape[1] for batch in states)
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress("head", done, total, "layers")

        gradients: list[Tensor] = []
        with self.passage.open_head() as compute_logits:
            for batch_states in states:
                gradients.append(
                    differentiate_head(batch_states, compute_logits, first_sample, advance)
                )
                first_sample += len(batch_states)
        return gradients

    @contextmanager
    def _meet(self) -> Iterator[None]:
        """Let all processes go on after a step only if it has succeeded in all of them."""
        problem: UnsupportedError | None = None
        try:
            yield
        except UnsupportedError as error:
            problem = error
        failed = self._make_flag(problem is not None)
        self.group.sum_(failed)
        if problem is not None:
            raise problem
        if failed.any():
            raise UnsupportedError("gradients cannot go back through the model in another process")

    def _make_flag(self, value: bool) -> Tensor:
        """Make a flag that can be summed over the processes."""
        return torch.tensor(
            [float(value)], device=self.group.device or self.passage.partwise.device
        )


def select_groups(
    partwise: PartwiseModel,
    groups: Sequence[Inputs],
    linear_names: Collection[str],
    *,
    with_experts: bool,
) -> dict[str, list[SiteGroup]]:
    """Select the groups of products in blocks that have any of some linears, by block.

    Args:
        linear_names: as the rows of sites name them.
        with_experts: also select the products of experts, whose tokens the router weights.
    """
    groups_by_part: dict[str, list[SiteGroup]] = {}
    for group in groups:
        block = find_block(partwise, group.sites[0])
        # Gradients by the outputs of the head, for example, are not followed.
        if block is None:
            continue
        if not with_experts and any(site.expert is not None for site in group.sites):
            continue
        if not set(linear_names).isdisjoint(list_linears(group.sites)):
            groups_by_part.setdefault(block, []).append(group.sites)
    return groups_by_part


def find_block(partwise: PartwiseModel, site: Site) -> str | None:
    """Find the block that a product is in; None if it is in none."""
    module = site.module
    while module:
        part = partwise.part_of(module)
        if part is not None and partwise.is_listed(part):
            return part
        # A part may be within a block.
        module = module.rpartition(".")[0]
    return None


def list_linears(sites: Sequence[Site]) -> list[str]:
    """List the linears of products that have the same inputs, in the order of their outputs."""
    names: list[str] = []
    for site in sites:
        for linear, _, _ in site.rows:
            names.append(linear)
    return names


@contextmanager
def _hook_outputs(
    partwise: PartwiseModel, sites: Sequence[Site], sums: OutputSums
) -> Iterator[None]:
    """Add gradients by the outputs of products to sums, as they come."""
    model: nn.Module = partwise.model

    def add(site: Site, gradient: Tensor) -> None:
        rows = gradient.flatten(0, -2)
        for linear, start, stop in site.rows:
            sums.add(linear, rows[:, start:stop])

    def watch(site: Site, output: Tensor) -> Tensor:
        if not output.requires_grad:
            # What does not depend on the tokens has neither inputs nor weights that require
            # gradients. A copy, because the model's code may write to it.
            output = output.clone()
            begin_graph([output])
        output.register_hook(partial(add, site))  # type: ignore[no-untyped-call]
        return output

    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    stacked: dict[tuple[str, str, int | None], Site] = {}

    class OutputVisitor:
        """Watches the outputs of stacked experts, which are no modules."""

        def visit_routing(self, experts: nn.Module, counts: list[int]) -> None:
            pass

        def visit_product(
            self, experts: nn.Module, leaf: str, expert: int | None, brought: Brought
        ) -> None:
            pass

        def visit_output(
            self, experts: nn.Module, leaf: str, expert: int | None, output: Tensor
        ) -> Tensor:
            site = stacked.get((names[experts], leaf, expert))
            return output if site is None else watch(site, output)

    handles: list[Any] = []
    for site in sites:
        outputs = max(stop for _, _, stop in site.rows)
        # So that linears that no gradient reaches have rows too.
        add(site, torch.zeros(0, outputs))
        if site.expert is not None and site.stacked:
            stacked[site.module, site.leaf, site.expert] = site
            continue
        module = model.get_submodule(site.owner)

        def hook_output(module: nn.Module, args: Any, output: Tensor, site: Site = site) -> Tensor:
            return watch(site, output)

        handles.append(module.register_forward_hook(hook_output))
    if stacked:
        partwise.set_visitor(OutputVisitor())
    try:
        yield
    finally:
        if stacked:
            partwise.set_visitor(None)
        for handle in handles:
            handle.remove()
