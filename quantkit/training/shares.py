"""A training of several processes: what each has of the model and of the samples, and where their
gradients meet.

The factors of a weight are whole on every process, and so are their gradients: each process adds
what its part of the weight gives. Thus what a split repeats, such as scales of a group that lies on
two processes or of a KV head that several of them have, stays the same everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import parameters
from quantkit.distributed.mesh import Mesh
from quantkit.formats.checkpoint import Checkpoint, resolve_stored_name
from quantkit.model.decoder import Block
from quantkit.model.tensor_parallel import ParallelLinear, TensorParallel
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.training.trained import factor_places, factor_shape

_WITHIN_BRANCHES = (".self_attn.", ".mlp.")


class Shares:
    """This process's shares, for a model that is trained.

    Attributes:
        mesh: the processes.
        model: connects the parts of the model, see `TensorParallel`.
    """

    def __init__(self, model: Checkpoint, mesh: Mesh) -> None:
        """Raises `RequestError` if the processes cannot share the model."""
        self.mesh, self.model, self._source = (
            mesh,
            TensorParallel(model, mesh.model, trained=True),
            model,
        )
        self._parameters = {parameter.name: parameter for parameter in parameters(model.config)}

    def head_of(self, checkpoint: Checkpoint) -> Tensor | QuantTensor:
        """This process's rows of a model's head, without padding."""
        return checkpoint.load(
            resolve_stored_name(checkpoint, "lm_head.weight"), self.model.head_rows
        )

    def samples(self, numbers: Tensor) -> Tensor:
        """Return those of this process, of the samples of a step."""
        return numbers[self.mesh.data.share(len(numbers))]

    def sum_over_samples(self, value: float) -> float:
        """Return the sum of what the processes with other samples found."""
        if self.mesh.data.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        if self.mesh.data.device is not None:
            total = total.to(self.mesh.data.device)
        else:
            total = total
        self.mesh.data.sum_(total)
        return total.item()

    def part(self, name: str) -> TensorSlice | None:
        """This process's slice of a tensor; None for all of it."""
        return self.model.part(self._parameters[name])

    def total(self, name: str, local_gradient: Tensor | None) -> Tensor | None:
        """Return the gradient by the factors of a tensor: the sum over all processes.

        Args:
            own: the gradient by those of this process's part; None if its samples had none.

        Returns:
            None if no process had one.
        """
        if self.mesh.world.size == 1:
            return local_gradient
        info = self._source.info(name)
        shape = torch.Size(factor_shape(info))
        flat = torch.zeros(1 + shape.numel())
        added_elsewhere = self.mesh.model.rank > 0 and not any(
            one in name for one in _WITHIN_BRANCHES
        )
        if local_gradient is not None:
            flat[0] = 1
            # The gradients by norms between branches are whole on each process.
            if not added_elsewhere:
                flat[1:].view(shape).index_add_(
                    *factor_places(self.part(name), info, local_gradient.shape[-1]), local_gradient
                )
        on_device = flat.to(self.mesh.world.device)
        self.mesh.world.sum_(on_device)
        flat = on_device.cpu()
        if flat[0]:
            return flat[1:].view(shape)
        return None


class SharedBlock(Block):
    """A block whose branches begin with a process's part of the model."""

    def __init__(self, config: ModelConfig, layer: int, shares: Shares) -> None:
        super().__init__(config, layer)
        self.enter = shares.model.enter

    def apply_norm(self, branch: str, x: Tensor) -> Tensor:
        return self.enter(super().apply_norm(branch, x))


def get_local_parameter(block: Block, name: str) -> nn.Parameter:
    """Return a parameter of a block that may be connected with those of other processes."""
    module, _, leaf = name.rpartition(".")
    owner = block.get_submodule(module)
    return (owner.shard if isinstance(owner, ParallelLinear) else owner).get_parameter(leaf)
