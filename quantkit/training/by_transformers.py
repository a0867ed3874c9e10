"""Train a model that transformers runs, by one process on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.passes.passage import Passage
from quantkit.training.blockwise import TOKENS_THROUGH_THE_HEAD, Blockwise, measure_divergence
from quantkit.training.optimizer import Schedule
from quantkit.training.places import find_places
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Samples
from quantkit.via_transformers.forward import passage_of
from quantkit.via_transformers.lazy_model import LazyModel


def make_transformers_engine(
    model: TrainedCheckpoint, reference: Checkpoint, samples: Samples, schedule: Schedule
) -> Blockwise:
    """Make the engine that trains a model without a decoder here.

    Args:
        reference: the float model.

    Raises:
        UnsupportedError: if transformers does not run the model.
    """
    passage = passage_of(model)
    return Blockwise(
        model,
        passage,
        find_places(passage.partwise, model, model.names_trained),
        TransformersHead(passage, passage_of(reference)),
        shares=NotShared(),
        samples=samples,
        schedule=schedule,
    )


class TransformersHead:
    """What follows the bases of two models of transformers; a `Head`. Its tensors do not change."""

    def __init__(self, passage: Passage[LazyModel], reference: Passage[LazyModel]) -> None:
        self._passage = passage
        self._reference = reference

    def measure(self, states: list[Tensor], targets: Tensor) -> float:
        return self._sum_divergence(states, targets, None)

    def differentiate(
        self, states: list[Tensor], targets: Tensor, count: int
    ) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        gradients = [torch.empty_like(batch) for batch in states]
        total = self._sum_divergence(states, targets, gradients)
        for gradient in gradients:
            gradient.div_(count)
        return total, gradients, {}

    def _sum_divergence(
        self, states: list[Tensor], targets: Tensor, gradients: list[Tensor] | None
    ) -> float:
        """Sum KL over states [B, T, D] of batches, and write its gradients by the states to tensors
        of the same shapes, if given.
        """
        total = 0.0
        with self._passage.open_head() as compute, self._reference.open_head() as compute_expected:
            targets_of_batches = torch.split(targets, [len(batch) for batch in states])
            for index, (batch, batch_targets) in enumerate(
                zip(states, targets_of_batches, strict=True)
            ):
                hidden = batch.flatten(0, 1)
                expected_hidden = batch_targets.flatten(0, 1)
                # By parts, because the logits of all tokens would need much memory.
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


class NotShared:
    """The `TrainingShares` of one process, which has all of the model and of the samples."""

    def samples(self, numbers: Tensor) -> Tensor:
        return numbers

    def sum_over_samples(self, value: float) -> float:
        return value

    def part(self, name: str) -> None:
        return None

    def total(self, name: str, local_gradient: Tensor | None) -> Tensor | None:
        return local_gradient
