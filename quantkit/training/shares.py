"""Divide a training among several processes: each has a part of the model and of the samples, and
their gradients are summed.

Every process has all factors of a weight, and their gradients: each process adds the gradients of
its part of the weight. So factors that a split repeats, such as scales of a group that is cut
between two processes or of a KV head that several of them have, stay the same everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.distributed.mesh import Mesh
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.model.decoder import Block
from quantkit.model.mixers.attention import Attention
from quantkit.model.tensor_parallel import TensorParallel
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.training.trained import factor_places, factor_shape

# Parts of the names of the tensors that belong to a branch.
_WITHIN_BRANCHES = (".self_attn.", ".mlp.")


class Shares:
    """This process's shares, for a model that is trained.

    Attributes:
        mesh: the processes.
        model: connects the parts of the model, see `TensorParallel`.
    """

    def __init__(self, model: Checkpoint, mesh: Mesh) -> None:
        """Raises `RequestError` if the processes cannot share the model."""
        self.mesh = mesh
        self.model = TensorParallel(model, mesh.model, trained=True)
        self._source = model
        self._parameters = {parameter.name: parameter for parameter in parameters(model.config)}

    def head_of(self, checkpoint: Checkpoint) -> Tensor | QuantTensor:
        """Load this process's rows of a model's head, without padding."""
        # A tied head is stored as the embedding.
        name = resolve_stored_name(checkpoint, "lm_head.weight")
        return checkpoint.load(name, self.model.head_rows)

    def samples(self, numbers: Tensor) -> Tensor:
        """Select the samples of this process from those of a step."""
        return numbers[self.mesh.data.share(len(numbers))]

    def sum_over_samples(self, value: float) -> float:
        """Sum a value over the processes that have other samples."""
        if self.mesh.data.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        if self.mesh.data.device is not None:
            total = total.to(self.mesh.data.device)
        self.mesh.data.sum_(total)
        return total.item()

    def part(self, name: str) -> TensorSlice | None:
        """Find this process's slice of a tensor; None for all of it."""
        return self.model.part(self._parameters[name])

    def total(self, name: str, local_gradient: Tensor | None) -> Tensor | None:
        """Sum the gradient by the factors of a tensor over all processes.

        Args:
            local_gradient: by the factors of this process's part; None if its samples had none.

        Returns:
            None if no process had a gradient.
        """
        if self.mesh.world.size == 1:
            return local_gradient
        info = self._source.info(name)
        shape = torch.Size(factor_shape(info))
        # The first element counts the processes that have a gradient, so that one sum is enough.
        flat = torch.zeros(1 + shape.numel())
        # The gradients by norms between branches are complete on each process, so only the first
        # one adds them.
        within_branch = any(part in name for part in _WITHIN_BRANCHES)
        added_elsewhere = self.mesh.model.rank > 0 and not within_branch
        if local_gradient is not None:
            flat[0] = 1
            if not added_elsewhere:
                groups = local_gradient.shape[-1]
                axis, places = factor_places(self.part(name), info, groups)
                flat[1:].view(shape).index_add_(axis, places, local_gradient)
        on_device = flat.to(self.mesh.world.device)
        self.mesh.world.sum_(on_device)
        flat = on_device.cpu()
        if flat[0]:
            return flat[1:].view(shape)
        return None


class SharedBlock(Block):
    """A block whose branches begin with this process's part of the model."""

    def __init__(self, config: ModelConfig, layer: int, shares: Shares) -> None:
        super().__init__(config, layer)
        self.enter = shares.model.enter

    def apply_norm(self, branch: str, x: Tensor) -> Tensor:
        normed = super().apply_norm(branch, x)
        # Each process has all of another mixer than attention, so its gradients are complete.
        if branch == "mixer" and not isinstance(self.mixer, Attention):
            return normed
        return self.enter(normed)
