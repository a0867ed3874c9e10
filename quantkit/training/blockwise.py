"""Training block by block, by one process or by those of a mesh: one block's weights are in
memory at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.base.progress import Progress
from quantkit.distributed.mesh import ALONE, Mesh
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.layerwise import Batch
from quantkit.training.optimizer import Optimizer, Schedule
from quantkit.training.passes import Passes
from quantkit.training.shares import Shares
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Hidden, Samples
from quantkit.via_transformers.forward import final_hidden


class Blockwise:
    """The `Engine` of torch."""

    def __init__(
        self,
        model: TrainedCheckpoint,
        reference: Checkpoint,
        samples: Samples,
        schedule: Schedule,
        device: torch.device,
        mesh: Mesh = ALONE,
    ) -> None:
        """
        Args:
            reference: the float model.

        Raises:
            RequestError: if the processes of a mesh cannot share the model.
        """
        self._samples = samples
        self._shares = Shares(model, mesh)
        self._passes = Passes(model, reference, samples.tokens.shape[1], device, self._shares)
        self._optimizer = Optimizer(model, schedule, self._shares)
        self.moments = self._optimizer.moments
        # The trained tensors of each layer, and last those without a layer.
        self._names: list[list[str]] = []
        names_in_layers: set[str] = set()
        for layer in range(model.config.num_layers):
            trained = model.names_trained.in_layer(layer)
            layer_names = [*trained.weights, *trained.norms]
            self._names.append(layer_names)
            names_in_layers.update(layer_names)
        self._names.append([name for name in model.factors if name not in names_in_layers])

    def step(self, step: int, numbers: Tensor) -> float:
        local_numbers = self._shares.samples(numbers)
        samples = self._samples
        # The optimizer runs within the backward pass, so that the gradients of one layer are in
        # memory at a time.
        local_sum = self._passes.gradients(
            samples.tokens[local_numbers],
            samples.targets(local_numbers),
            self._names,
            lambda name, gradient: self._optimizer.update(step, name, gradient),
            count=len(numbers) * samples.tokens.shape[1],
        )
        return self._shares.sum_over_samples(local_sum)

    def loss(self, numbers: Tensor) -> float:
        samples = self._samples
        total = 0.0
        for part in torch.split(self._shares.samples(numbers), samples.batch):
            # `torch.split` gives one empty part if this process has no sample.
            if len(part):
                total += self._passes.loss(samples.tokens[part], samples.targets(part))
        return self._shares.sum_over_samples(total) / (len(numbers) * samples.tokens.shape[1])

    def fetch(self) -> None:
        """Do nothing: the factors and moments are the model's own."""

    def put(self) -> None:
        """Do nothing: the factors and moments are the model's own."""


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
