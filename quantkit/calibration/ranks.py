"""The processes that share one calibration: each takes some of the samples and some of the rows."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_LONGEST_JOB = timedelta(days=365)
T = TypeVar("T")


class Ranks:
    """This process among those of `torch.distributed`, or alone where that is not in use."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self._patient: dist.ProcessGroup | None = None

    def meet(self) -> None:
        """Prepare to wait where one process works and the others cannot: all processes call this together.

        Collectives elsewhere give up after a while (30 minutes in gloo, 10 in NCCL), since there all compute.
        """
        if self.size > 1:
            self._patient = dist.new_group(backend="gloo", timeout=_LONGEST_JOB)

    def share(self, count: int) -> slice:
        """Which of so many things are this process's."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum_(self, value: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            dist.all_reduce(value)

    def join(self, value: Tensor, total: int) -> Tensor:
        """All processes' shares of rows, one after the other; equal bits on all of them."""
        if self.size == 1:
            return value
        whole = torch.empty(total, *value.shape[1:], dtype=value.dtype, device=value.device)
        for rank in range(self.size):
            part = slice(total * rank // self.size, total * (rank + 1) // self.size)
            rows = value.contiguous() if rank == self.rank else torch.empty_like(whole[part])
            dist.broadcast(rows, rank)
            whole[part] = rows
        return whole

    def agree(self, value: T) -> T:
        """What the first process says, however long that takes."""
        said = [value]
        if self.size > 1:
            dist.broadcast_object_list(said, group=self._patient)
        return said[0]

    def wait(self) -> None:
        """Until all processes are here, however long that takes."""
        if self.size > 1:
            dist.barrier(self._patient)
