"""A decoder block whose linear layers stay on disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantkit.distributed.sharded import Sharded
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import Block
from quantkit.model.load import BLOCK_PREFIX, fill
from quantkit.model.meta_init import meta_init
from quantkit.model.product import wide_products
from quantkit.model.tensor_parallel import connect_blocks


class OffloadedLinear(nn.Module):
    """``x @ weight.T + bias`` in float32, the weight read at every call, some rows at a time.

    The tokens of several sequences, one after the other, are multiplied sequence by sequence: a matrix product's bits
    depend on its size.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, bias: bool, lengths: Sequence[int]) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._name = name
        self._bias = bias
        self._lengths = list(lengths)

    def forward(self, x: Tensor) -> Tensor:
        """[1, N, I] float32 to [1, N, O] float32."""
        weight = self._checkpoint.load(self._name + ".weight")
        out = torch.cat(wide_products(torch.split(x, self._lengths, dim=1), weight), dim=1)
        if self._bias:
            bias = self._checkpoint.load(self._name + ".bias")
            assert isinstance(bias, Tensor)
            out += bias
        return out


def offloaded_block(checkpoint: Checkpoint, layer: int, lengths: Sequence[int]) -> Block:
    """One decoder layer on the CPU in float32, of which only the norms are in memory.

    Args:
        lengths: of what it is given [1, N, D], how many tokens belong together; their sum is N.
    """
    with meta_init():
        block = Block(checkpoint.config, layer)
    prefix = BLOCK_PREFIX.format(layer)
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            linear = OffloadedLinear(checkpoint, prefix + name, module.bias is not None, lengths)
            setattr(block.get_submodule(parent), child, linear)
        elif "weight" in module._parameters:
            fill(module, checkpoint, f"{prefix}{name}.", torch.device("cpu"), torch.float32, None)
    if isinstance(checkpoint, Sharded):
        connect_blocks(block, checkpoint, prefix)
    return block.eval()
