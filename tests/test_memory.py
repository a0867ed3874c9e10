"""Sizes in words, and the memory that this process can have."""

from __future__ import annotations

import pytest

from quantkit.base import memory
from quantkit.base.cgroups import MemoryLimit

GB = 10**9


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (999, "0.999 kB"),
        (1500, "1.5 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (999_997_440, "1 GB"),
    ],
)
def test_sizes_have_three_digits(size: int, words: str) -> None:
    assert memory.size_text(size) == words


@pytest.mark.parametrize(
    ("limits", "total", "available"),
    [
        ([MemoryLimit(GB, GB // 4)], GB, GB - GB // 4),
        ([MemoryLimit(GB, GB // 4), MemoryLimit(2 * GB, 2 * GB - 1000)], GB, 1000),
        ([MemoryLimit(GB, 2 * GB)], GB, 0),  # beyond `memory.high`
    ],
)
def test_memory_is_that_of_the_smallest_group(
    limits: list[MemoryLimit], total: int, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limits", lambda: limits)
    assert (memory.total_bytes(), memory.available_bytes()) == (total, available)


def test_memory_is_at_most_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_limits", lambda: [MemoryLimit(2**63 - 4096, 0)])
    assert memory.total_bytes() == memory.machine_bytes()
    assert 10**6 < memory.available_bytes() <= memory.machine_bytes()
