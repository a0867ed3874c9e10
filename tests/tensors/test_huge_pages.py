"""Memory for weights on huge pages."""

from __future__ import annotations

import gc
import io
import itertools
import weakref

import pytest
import torch

from quantkit.tensors import huge_pages
from quantkit.tensors.huge_pages import WeightMemory, allocate_bytes

SHAPES = [(3, 5), (1, 1), (0, 7), (1000, 1000), (4096, 2048), (2000, 3000), (4096, 5000)]


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_tensors_do_not_overlap_and_can_be_saved_alone(
    has_huge_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "HAS_HUGE_PAGES", has_huge_pages and huge_pages.HAS_HUGE_PAGES)
    memory, tensors = WeightMemory(), list[torch.Tensor]()
    for shape, dtype in itertools.product(SHAPES, (torch.bfloat16, torch.float32)):
        tensor = memory.empty(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
        tensors.append(tensor.fill_(len(tensors)))
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all())
    file = io.BytesIO()
    torch.save(tensors[0], file)
    assert len(file.getvalue()) < 10_000


def test_memory_goes_back_with_its_last_tensor() -> None:
    memory = WeightMemory()
    first, second = memory.empty((9, 9), torch.float32), memory.empty((9, 9), torch.float32)
    if memory._memory is None:
        pytest.skip("no huge pages")
    mapped = weakref.ref(memory._memory)
    del memory, first
    gc.collect()
    assert mapped() is not None
    second.fill_(1)
    del second
    gc.collect()
    assert mapped() is None


def test_any_number_of_bytes_is_allocated() -> None:
    for count in (0, 1, 1000, 1 << 20, (5 << 20) + 3):
        assert allocate_bytes(count).fill_(7).numel() == count
