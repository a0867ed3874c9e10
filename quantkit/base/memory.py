"""Memory: sizes in words, the memory of this process and machine, and the settings of glibc's
allocator.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.base.cgroups import memory_limits, read_numbers
from quantkit.errors import RequestError

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "Storage size calculation overflowed",
    "RESOURCE_EXHAUSTED",
)

# of glibc's mallopt
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def size_text(count: int) -> str:
    """Return a number of bytes with its unit."""
    for size, unit in ((10**9, "GB"), (10**6, "MB")):
        if count >= 0.9995 * size:  # with three digits, a thousand of the next unit
            return f"{count / size:.3g} {unit}"
    return f"{count / 1000:.3g} kB"


def resident_bytes() -> int:
    """Return the resident memory of this process; its peak on systems that report no more."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_bytes() -> int:
    """Return the peak of this process's resident memory, since `reset_peak` if that succeeded."""
    status = read_numbers(Path("/proc/self/status"))
    peak = status.get("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak * 1024, resident_bytes())


def reset_peak() -> bool:
    """Reset `peak_bytes`; False if the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def machine_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_bytes() -> int:
    """Return the memory that this process could use at best: the machine's, or the limit of a
    control group.
    """
    return min([machine_bytes(), *(group.limit for group in memory_limits())])


def available_bytes() -> int:
    """Return the memory that is available without swapping, on the machine and within the limits of
    the control groups.
    """
    meminfo = read_numbers(Path("/proc/meminfo"))
    if "MemAvailable" in meminfo:
        free = meminfo["MemAvailable"] * 1024
    else:
        free = machine_bytes()
    return max(0, min([free, *(group.limit - group.used for group in memory_limits())]))


@contextmanager
def enough_memory(path: Path | None) -> Iterator[None]:
    """Turn the several errors of torch and XLA for a lack of memory into one. Raises `RequestError`
    if memory runs out in the block.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(
            sign in str(error) for sign in _OUT_OF_MEMORY
        ):
            raise
        raise RequestError(
            "does not fit in memory", path=path, hint="request fewer tokens or texts at once"
        ) from error


def malloc_trim() -> None:
    """Return free memory of the allocator's heap to the system."""
    _call("malloc_trim", 0)


def set_mmap_threshold(size: int) -> None:
    """From now on, allocate each buffer of at least `size` bytes by mmap, so that freeing it
    returns its pages.

    By default, glibc soon serves buffers up to 32 MB from its heap, where freed ones leave holes.
    """
    _call("mallopt", _MMAP_THRESHOLD, size)
    _call("mallopt", _TRIM_THRESHOLD, 8 * size)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, name):
        getattr(libc, name)(*arguments)
