"""This process's memory: what it has, and giving it back to the system where the C library can."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def resident_bytes() -> int:
    """What this process holds in memory now, or at its peak where the system does not tell."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def give_back() -> None:
    """Return what is free inside the allocator's heap."""
    _call("malloc_trim", 0)


def keep_out_of_heap(size: int) -> None:
    """From now on give each buffer of at least so many bytes pages of its own, which go back when it is freed.

    Left alone, glibc soon serves up to 32 MB from its heap, where freed buffers leave holes.
    """
    _call("mallopt", _MMAP_THRESHOLD, size)
    _call("mallopt", _TRIM_THRESHOLD, 8 * size)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, name):
        getattr(libc, name)(*arguments)
