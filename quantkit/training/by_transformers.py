"""Train a model that transformers runs, block by block: one block's weights are in memory at a
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from quantkit.calibration.effort import batch_samples
from quantkit.formats.checkpoint import Checkpoint
from quantkit.passes.block_passes import BlockPasses
from quantkit.training.optimizer import Optimizer, Schedule
from quantkit.training.passes import TOKENS_THROUGH_THE_HEAD, measure_divergence
from quantkit.training.places import Place, find_places
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Samples
from quantkit.via_transformers.forward import passage_of

ComputeLogits = Callable[[Tensor], Tensor]


class TransformersEngine:
    """The `Engine` for models without a decoder here, by one process on the CPU."""

    def __init__(
        self,
        model: TrainedCheckpoint,
        reference: Checkpoint,
        samples: Samples,
        schedule: Schedule,
    ) -> None:
        """
        Args:
            reference: the float model.

        Raises:
            UnsupportedError: if transformers does not run the model.
        """
        self._samples = samples
        self._passage = passage_of(model)
        self._reference = passage_of(reference)
        self._together = batch_samples(model.config, samples.tokens.shape[1])
        self._optimizer = Optimizer(model, schedule, NotShared())
        self.moments = self._optimizer.moments
        places = find_places(self._passage.partwise, model, model.names_trained)
        self._places: dict[str, dict[str, Place]] = defaultdict(dict)
        self._outside: dict[str, str] = {}
        for name, place in places.items():
            if place.block is None:
                self._outside[place.parameters[0]] = name
            else:
                self._places[place.block][name] = place

    def step(self, step: int, numbers: Tensor) -> float:
        tokens = self._samples.tokens[numbers]
        batches = torch.split(tokens, self._together)
        count = tokens.numel()
        passes = BlockPasses(self._passage, batches, dtype=torch.float32)
        states = passes.forward(self._places, self._outside)
        gradients = [torch.empty_like(batch) for batch in states]
        # By parts of the batches, because the logits of all tokens would need much memory.
        total = self._measure(states, self._samples.targets(numbers), gradients)
        for gradient in gradients:
            gradient.div_(count)
        passes.turn(gradients)
        # The backward pass has copies of what it needs.
        del states, gradients

        @contextmanager
        def open_block(block: str) -> Iterator[None]:
            places = self._places.get(block, {})
            with self._collect(places, parameter_gradients[block]):
                yield
            # Blocks that are called several times change after the last of their gradients.
            if not passes.is_pending(block):
                self._update(step, places, parameter_gradients.pop(block))

        parameter_gradients: dict[str, dict[str, Tensor]] = defaultdict(dict)
        outside = passes.backward(open_block)
        for parameter, name in self._outside.items():
            self._optimizer.update(step, name, outside.get(parameter))
        return total / count

    @contextmanager
    def _collect(self, places: Mapping[str, Place], gradients: dict[str, Tensor]) -> Iterator[None]:
        """Add the gradients by the parameters at some places to a dictionary, by their names."""
        parameters: dict[str, torch.nn.Parameter] = {}
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
        for part in torch.split(numbers, samples.batch):
            batches = torch.split(samples.tokens[part], self._together)
            states = self._passage.compute_hidden_states(batches)
            total += self._measure(states, samples.targets(part), None)
        return total / (len(numbers) * samples.tokens.shape[1])

    def _measure(
        self, states: list[Tensor], targets: Tensor, gradients: list[Tensor] | None
    ) -> float:
        """Sum KL(reference || model) over states [B, T, D] of batches, given the reference's [N, T,
        D], and write its gradients by the states to tensors of the same shapes, if there are any.
        """
        total = 0.0
        with self._passage.open_head() as compute, self._reference.open_head() as compute_expected:
            targets_of_batches = torch.split(targets, [len(batch) for batch in states])
            for index, (batch, batch_targets) in enumerate(
                zip(states, targets_of_batches, strict=True)
            ):
                hidden = batch.flatten(0, 1)
                expected_hidden = batch_targets.flatten(0, 1)
                for start in range(0, len(hidden), TOKENS_THROUGH_THE_HEAD):
                    rows = slice(start, start + TOKENS_THROUGH_THE_HEAD)
                    with torch.no_grad():
                        expected = compute_expected(expected_hidden[rows])
                    leaf = hidden[rows].detach().requires_grad_(gradients is not None)
                    with torch.set_grad_enabled(gradients is not None):
                        logits = compute(leaf)
                    divergence, by_logits = measure_divergence(logits.detach(), expected)
                    total += divergence
                    if gradients is not None:
                        logits.backward(by_logits)  # type: ignore[no-untyped-call]
                        assert leaf.grad is not None
                        gradients[index].flatten(0, 1)[rows] = leaf.grad
        return total

    def fetch(self) -> None:
        """Do nothing: the factors and moments are the model's own."""

    def put(self) -> None:
        """Do nothing: the factors and moments are the model's own."""


class NotShared:
    """The `SharedGradients` of one process, which has all of the model and of the samples."""

    def part(self, name: str) -> None:
        return None

    def total(self, name: str, local_gradient: Tensor | None) -> Tensor | None:
        return local_gradient
