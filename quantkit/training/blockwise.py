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
        self._samples, self._shares = samples, Shares(model, mesh)
        self._passes = Passes(model, reference, samples.tokens.shape[1], device, self._shares)
        self._optimizer = Optimizer(model, schedule, self._shares)
        self.moments = self._optimizer.moments
        layers = []
        for layer in range(model.config.num_layers):
            layers.append(model.names_trained.in_layer(layer))
        self._names = [[*own.weights, *own.norms] for own in layers]
        named = set()
        for own in self._names:
            for name in own:
                named.add(name)
        self._names.append([name for name in model.factors if name not in named])

    def step(self, step: int, numbers: Tensor) -> float:
        own = self._shares.samples(numbers)
        samples = self._samples
        found = self._passes.gradients(
            samples.tokens[own],
            samples.targets(own),
            self._names,
            lambda name, gradient: self._optimizer.update(step, name, gradient),
            count=len(numbers) * samples.tokens.shape[1],
        )
        return self._shares.sum_over_samples(found)

    def loss(self, numbers: Tensor) -> float:
        samples = self._samples
        total = 0.0
        for part in torch.split(self._shares.samples(numbers), samples.batch):
            if len(part):
                total += self._passes.loss(samples.tokens[part], samples.targets(part))
        return self._shares.sum_over_samples(total) / (len(numbers) * samples.tokens.shape[1])

    def fetch(self) -> None:
        """They are the model's own."""

    def put(self) -> None:
        """They are the model's own."""


def float_states(reference: Checkpoint, batch: int, mesh: Mesh = ALONE) -> Hidden:
    """Runs a float model, by all processes of a mesh, on a number of samples at a time."""

    def hidden(tokens: Tensor, progress: Progress) -> Tensor:
        own = torch.split(tokens[mesh.data.share(len(tokens))], batch)
        batches = [Batch.from_start(one) for one in own if len(one)]
        if batches:
            found = final_hidden(reference, batches, group=mesh.model, progress=progress)
        else:
            found = []
        none = torch.empty(0, tokens.shape[1], reference.config.hidden_size)
        return mesh.data.join(
            torch.cat([none, *found]).to(mesh.data.device or "cpu"), len(tokens)
        ).cpu()

    return hidden
