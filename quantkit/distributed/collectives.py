"""Collectives within a model: traceable ones, and the modules that call them.

The operators beneath `torch.distributed._functional_collectives` are called: its functions change their
names from one torch to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quantkit.distributed.group import ProcessGroup


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of all processes' tensors, with equal bits on all of them."""
    operators = torch.ops._c10d_functional
    total: Tensor = operators.wait_tensor(operators.all_reduce(x.contiguous(), "sum", group.name))
    return total


def all_gather(x: Tensor, group: ProcessGroup, width: int) -> Tensor:
    """All processes' tensors [..., W] side by side, and of that the first columns: [..., width]."""
    operators = torch.ops._c10d_functional
    flat = x.reshape(-1, x.shape[-1])
    stacked = operators.wait_tensor(operators.all_gather_into_tensor(flat.contiguous(), group.size, group.name))
    joined: Tensor = stacked.view(group.size, *x.shape).movedim(0, -2).flatten(-2)
    return joined[..., :width]


def vocab_parallel_embedding(
    tokens: Tensor, look_up: Callable[[Tensor], Tensor], rows: int, first_row: int, group: ProcessGroup
) -> Tensor:
    """Embeddings [..., D] of tokens [...].

    Args:
        look_up: gives those of the rows that this process has, by their numbers here.
        rows, first_row: how many these are, and which is the first.
    """
    own = tokens - first_row
    elsewhere = (own < 0) | (own >= rows)
    found = look_up(own.masked_fill(elsewhere, 0))
    return all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0), group)


class RowParallelLinear(nn.Module):
    """A linear of which each process has the columns of some inputs; what they give is added up."""

    def __init__(self, own: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.own = own
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(self.own(x), self.group)


class ColumnParallelLinear(nn.Module):
    """A linear of which each process has the rows of some outputs, the last perhaps padded; it gives all of them,
    [..., width]."""

    def __init__(self, own: nn.Module, group: ProcessGroup, width: int) -> None:
        super().__init__()
        self.own = own
        self.group = group
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return all_gather(self.own(x), self.group, self.width)


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each process has some rows, those of `own` [R, D], from `first_row` on."""

    def __init__(self, own: nn.Module, rows: int, first_row: int, group: ProcessGroup) -> None:
        super().__init__()
        self.own = own
        self.rows = rows
        self.first_row = first_row
        self.group = group

    @property
    def weight(self) -> Tensor:
        """Its rows, where they are floats; a tied head multiplies by them."""
        found = self.own.weight
        assert isinstance(found, Tensor)
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_parallel_embedding(tokens, self.own, self.rows, self.first_row, self.group)
