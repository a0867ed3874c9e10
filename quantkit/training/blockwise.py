"""Training block by block, of any model: one block's weights are in memory at a time.

A forward pass keeps the inputs of every block. The backward pass computes each block again (three
times the work of a forward pass, all in float32), and changes its weights before it goes on. Of
several processes each computes with its share of the model and of the samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit.base.progress import Progress
from quantkit.calibration.effort import batch_samples
from quantkit.distributed.mesh import ALONE, Mesh
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.layerwise import Batch
from quantkit.passes.block_passes import BlockPasses
from quantkit.passes.passage import Passage
from quantkit.passes.site import Site, gather_weights
from quantkit.training.optimizer import Optimizer, Schedule, SharedGradients
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Hidden, Samples
from quantkit.via_transformers.forward import final_hidden

TOKENS_THROUGH_THE_HEAD = 256


@dataclass(frozen=True)
class Place:
    """Where a model has a tensor that is trained.

    Attributes:
        block: the part that it is in; None for one outside of blocks.
        parameters: the names of the parameters that have it, or rows of it.
        linear: the linear on disk whose weight several parameters or rows of one are; None if the
            tensor is one parameter.
        sites: the products with the weight of that linear.
    """

    block: str | None
    parameters: tuple[str, ...]
    linear: str | None = None
    sites: tuple[Site, ...] = ()

    def select(self, gradients: Mapping[str, Tensor]) -> Tensor | None:
        """Select the gradient by the tensor from those by parameters; None if not all have one."""
        if not gradients.keys() >= set(self.parameters):
            return None
        if self.linear is None:
            return gradients[self.parameters[0]].contiguous()
        gathered = gather_weights(self.sites, [self.linear], gradients.__getitem__)
        return gathered[self.linear]


class Head(Protocol):
    """What follows the blocks of a model, and of the reference, up to their logits."""

    def measure(self, states: list[Tensor], targets: Tensor) -> float:
        """Sum KL(reference || model) over the states [B, T, D] of batches, in nats, given the
        reference's hidden states before its head, [N, T, D].
        """
        ...

    def differentiate(
        self, states: list[Tensor], targets: Tensor, count: int
    ) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        """Compute the same sum; its gradients, divided by `count`, by the states of each batch; and
        those by tensors of the head that are trained, by name.
        """
        ...


class TrainingShares(SharedGradients, Protocol):
    """This process's part of a training."""

    def samples(self, numbers: Tensor) -> Tensor:
        """Select the samples of this process from those of a step."""
        ...

    def sum_over_samples(self, value: float) -> float:
        """Sum a value over the processes that have other samples."""
        ...


class Blockwise:
    """The `Engine` of torch, for a model of any kind."""

    def __init__(
        self,
        model: TrainedCheckpoint,
        passage: Passage[Any],
        places: Mapping[str, Place],
        head: Head,
        *,
        shares: TrainingShares,
        samples: Samples,
        schedule: Schedule,
    ) -> None:
        """
        Args:
            passage: through the blocks of `model`.
            places: of the trained tensors, by name, but not of those of the head.
        """
        self._passage = passage
        self._head = head
        self._shares = shares
        self._samples = samples
        self._together = batch_samples(model.config, samples.tokens.shape[1])
        self._optimizer = Optimizer(model, schedule, shares)
        self.moments = self._optimizer.moments
        self._places: dict[str, dict[str, Place]] = defaultdict(dict)
        self._outside: dict[str, str] = {}
        for name, place in places.items():
            if place.block is None:
                self._outside[place.parameters[0]] = name
            else:
                self._places[place.block][name] = place

    def step(self, step: int, numbers: Tensor) -> float:
        local_numbers = self._shares.samples(numbers)
        tokens = self._samples.tokens[local_numbers]
        count = len(numbers) * tokens.shape[1]
        batches = torch.split(tokens, self._together)
        passes = BlockPasses(self._passage, batches, dtype=torch.float32)
        states = passes.forward(self._places, self._outside)
        targets = self._samples.targets(local_numbers)
        total, gradients, head_gradients = self._head.differentiate(states, targets, count)
        for name, gradient in head_gradients.items():
            self._optimizer.update(step, name, gradient)
        passes.turn(gradients)
        # The backward pass has copies of what it needs.
        del states, targets, gradients

        @contextmanager
        def open_block(block: str) -> Iterator[None]:
            places = self._places.get(block, {})
            with self._collect(places, parameter_gradients[block]):
                yield
            # The optimizer runs within the backward pass, so that the gradients of one block are in
            # memory at a time. Blocks that are called several times change after the last of them.
            if not passes.is_pending(block):
                self._update(step, places, parameter_gradients.pop(block))

        parameter_gradients: dict[str, dict[str, Tensor]] = defaultdict(dict)
        outside = passes.backward(open_block)
        for parameter, name in self._outside.items():
            self._optimizer.update(step, name, outside.get(parameter))
        return self._shares.sum_over_samples(total / count)

    @contextmanager
    def _collect(self, places: Mapping[str, Place], gradients: dict[str, Tensor]) -> Iterator[None]:
        """Add the gradients by the parameters at some places to a dictionary, by their names."""
        parameters: dict[str, nn.Parameter] = {}
        for place in places.values():
            for name in place.parameters:
                parameter = self._passage.partwise.model.get_parameter(name)
                parameters[name] = parameter.requires_grad_()
        yield
        # No gradient reaches an expert to which no token was sent.
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                before = gradients.get(name)
                gradients[name] = parameter.grad if before is None else before + parameter.grad

    def _update(
        self, step: int, places: Mapping[str, Place], gradients: Mapping[str, Tensor]
    ) -> None:
        for name, place in places.items():
            self._optimizer.update(step, name, place.select(gradients))

    def loss(self, numbers: Tensor) -> float:
        samples = self._samples
        total = 0.0
        # As many as in a step, whose states are known to fit in memory.
        for part in torch.split(self._shares.samples(numbers), samples.batch):
            # `torch.split` gives one empty part if this process has no sample.
            if len(part):
                batches = torch.split(samples.tokens[part], self._together)
                states = self._passage.compute_hidden_states(batches)
                total += self._head.measure(states, samples.targets(part))
        return self._shares.sum_over_samples(total) / (len(numbers) * samples.tokens.shape[1])

    def fetch(self) -> None:
        """Do nothing: the factors and moments are the model's own."""

    def put(self) -> None:
        """Do nothing: the factors and moments are the model's own."""


def measure_divergence(logits: Tensor, expected: Tensor) -> tuple[float, Tensor]:
    """Sum KL(p || q) over tokens, in nats, for logits [N, V] of q and the expected logits of p.

    Returns:
        The sum, and its gradient by the logits of q.
    """
    log_q = logits.log_softmax(-1)
    log_p = expected.log_softmax(-1)
    p = log_p.exp()
    # Added in float64: the KL of an accurate model is tiny, and its terms have both signs.
    total = (p * (log_p - log_q)).sum(-1, dtype=torch.float64).sum().item()
    return total, log_q.exp_().sub_(p)


def float_states(reference: Checkpoint, batch: int, mesh: Mesh = ALONE) -> Hidden:
    """Make a function that runs a float model, by all processes of a mesh, on `batch` samples at a
    time.
    """

    def hidden(tokens: Tensor, progress: Progress) -> Tensor:
        batches: list[Batch] = []
        for batch_tokens in torch.split(tokens[mesh.data.share(len(tokens))], batch):
            if len(batch_tokens):
                batches.append(Batch.from_start(batch_tokens))
        if batches:
            states = final_hidden(reference, batches, group=mesh.model, progress=progress)
        else:
            states = []
        if states:
            local_states = torch.cat(states)
        else:
            # A process without samples takes part in the join with no rows.
            local_states = torch.empty(0, tokens.shape[1], reference.config.hidden_size)
        local_states = local_states.to(mesh.data.device or "cpu")
        return mesh.data.join(local_states, len(tokens)).cpu()

    return hidden
