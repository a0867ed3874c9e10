"""Memory for weights on huge pages, so that reading it takes few address translations."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

# In bytes.
_HUGE_PAGE = 2 << 20
# Tensors smaller than this share a mapping. Its pages are taken as they are written, and go back to
# the system with the last of its tensors.
_SHARED_BYTES = 32 << 20
# Kernels read whole cache lines.
_ALIGNMENT = 64
# Not every system has the call.
HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


def allocate_bytes(count: int) -> Tensor:
    """Allocate uint8 [count], on huge pages if the system has them."""
    # A smaller tensor does not fill a page.
    if count < _HUGE_PAGE or not HAS_HUGE_PAGES:
        return torch.empty(count, dtype=torch.uint8)
    memory, start = _map(count)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)


def _map(count: int) -> tuple[mmap.mmap, int]:
    """Map memory; return it and where in it the huge pages of `count` bytes begin."""
    # One page more than needed, because a mapping does not begin at the start of a huge page.
    memory = mmap.mmap(-1, count + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, count)
    return memory, start


class WeightMemory:
    """Allocates tensors one after the other: the weights of a small model's linears are each
    smaller than a huge page, and together they fill many.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._offset = 0
        self._end = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor with its own storage; its values are unspecified."""
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes == 0 or not HAS_HUGE_PAGES:
            return torch.empty(tuple(shape), dtype=dtype)
        if num_bytes >= _SHARED_BYTES:
            return allocate_bytes(num_bytes).view(dtype).view(tuple(shape))
        if self._offset + num_bytes > self._end:
            self._memory, self._offset = _map(_SHARED_BYTES)
            self._end = self._offset + _SHARED_BYTES
        assert self._memory is not None
        values = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._offset)
        self._offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return values.view(tuple(shape))
