"""Giving memory back to the system; on systems whose C library cannot, nothing happens."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


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
