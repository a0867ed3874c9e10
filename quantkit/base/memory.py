"""Measure the memory of this process and machine, format sizes, and set glibc's allocator."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.base.cgroups import memory_limits, read_numbers
from quantkit.errors import RequestError

# PyTorch on CPU and GPU, PyTorch for a tensor beyond 63 bits, and XLA. Only the text distinguishes
# these from other `RuntimeError`s.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "Storage size calculation overflowed",
    "RESOURCE_EXHAUSTED",
)

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def size_text(count: int) -> str:
    """Format a number of bytes in GB, MB or kB, with three digits."""
    for size, unit in ((10**9, "GB"), (10**6, "MB")):
        # From here on, three digits would round to 1000 of the smaller unit.
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1000:.3g} kB"


def resident_bytes() -> int:
    """Read the resident memory of this process; its peak on systems that report no more."""
    status = Path("/proc/self/statm")
    if status.exists():
        # The second number is the resident memory, in pages.
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_bytes() -> int:
    """Read the peak of this process's resident memory, since `reset_peak` if that succeeded."""
    status = read_numbers(Path("/proc/self/status"))
    # `reset_peak` resets VmHWM, but not ru_maxrss. Linux counts both in kB.
    peak = status.get("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak * 1024, resident_bytes())


def reset_peak() -> bool:
    """Reset `peak_bytes`; False if the system cannot."""
    try:
        # 5 sets VmHWM to the present resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def machine_bytes() -> int:
    """Read the size of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_bytes() -> int:
    """Determine the memory that this process could use at best: the machine's, or the limit of a
    control group.
    """
    limits = [machine_bytes()]
    for group in memory_limits():
        limits.append(group.limit)
    return min(limits)


def available_bytes() -> int:
    """Determine the memory that is available without swapping, on the machine and within the limits
    of the control groups.
    """
    meminfo = read_numbers(Path("/proc/meminfo"))
    # Unlike MemFree, this includes file cache that the system frees when memory is short.
    if "MemAvailable" in meminfo:
        available = [meminfo["MemAvailable"] * 1024]
    else:
        available = [machine_bytes()]
    for group in memory_limits():
        available.append(group.limit - group.used)
    # A group may use more than its "high" limit.
    return max(0, min(available))


@contextmanager
def enough_memory(path: Path | None) -> Iterator[None]:
    """Turn the several errors of torch and XLA for a lack of memory into one. Raises `RequestError`
    if memory runs out in the block.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError):
            message = str(error)
            if not any(sign in message for sign in _OUT_OF_MEMORY):
                raise
        raise RequestError(
            "does not fit in memory", path=path, hint="request fewer tokens or texts at once"
        ) from error


def malloc_trim() -> None:
    """Give free memory of the allocator's heap back to the system."""
    _call("malloc_trim", 0)


def set_mmap_threshold(size: int) -> None:
    """Make glibc allocate each further buffer of at least `size` bytes by mmap, so that freeing it
    returns its pages.
    """
    # By default, glibc raises the threshold as buffers are freed, up to 32 MB. Then it serves
    # larger buffers from its heap, where freed ones leave holes.
    _call("mallopt", _MMAP_THRESHOLD, size)
    _call("mallopt", _TRIM_THRESHOLD, 8 * size)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None)
    # Only glibc has these functions: not musl, and not macOS.
    if hasattr(libc, name):
        getattr(libc, name)(*arguments)
