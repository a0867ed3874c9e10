"""Find the processors that this process may use, and set the number of threads on them."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import sys
from pathlib import Path

from quantkit.base.arguments import as_integer
from quantkit.base.cgroups import cpu_quota
from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError

_MAX_THREADS = 256
_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPUINFO = Path("/proc/cpuinfo")
_FEATURES = frozenset(
    {
        "avx2",
        "fma",
        "f16c",
        "bmi1",
        "bmi2",
        "movbe",
        "abm",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
        "amx_int8",
        "amx_bf16",
        "asimd",
        "asimddp",
    }
)
# getauxval's key, and bits of its value (Linux, asm/hwcap.h).
_HWCAP = 16
_HWCAPS = {"asimd": 1, "asimddp": 20}


def logical_processors() -> list[int]:
    """List the numbers of the processors on which the system lets this process run."""
    # macOS has no affinity of processes to processors.
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(topology: Path = _TOPOLOGY) -> int:
    """Count the cores that have these processors: hyper-threads of a core count once, if the system
    lists them.
    """
    cores = set()
    for number in logical_processors():
        try:
            # All hyper-threads of a core have the same list.
            cores.add((topology / f"cpu{number}" / "topology" / "thread_siblings_list").read_text())
        except OSError:
            cores.add(str(number))
    return len(cores)


def quota_threads() -> int | None:
    """Compute the number of threads that a CPU quota allows, if there are more cores; None
    otherwise.
    """
    quota = cpu_quota()
    if quota is not None and quota <= physical_cores() - 1:
        return math.ceil(quota)
    return None


def validate_threads(count: object) -> int:
    """Convert a number of threads to `int`. Raises `RequestError` unless it is an integer from 1 to
    256, or to the number of processors if that is more.
    """
    limit = max(_MAX_THREADS, os.cpu_count() or 1)
    thread_count = as_integer("threads", count)
    if not 1 <= thread_count <= limit:
        raise RequestError(
            Message(Option("threads"), " is out of range"),
            found=format_value(thread_count),
            expected=f"1 to {limit}",
        )
    return thread_count


def set_threads(count: int | None) -> None:
    """Set the number of threads that torch will use, without importing it, here and in processes
    started from here.

    None is torch's own number, one for each physical core, or fewer if a CPU quota requires it; the
    environment's OMP_NUM_THREADS or MKL_NUM_THREADS overrides both.
    """
    if count is not None:
        # MKL would use no more threads than there are cores, and fewer if it chooses to.
        os.environ.update(
            OMP_NUM_THREADS=str(count), MKL_NUM_THREADS=str(count), MKL_DYNAMIC="FALSE"
        )
        # torch reads the variables only when it is imported.
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(count)
        return
    limit = quota_threads()
    if limit is not None and "MKL_NUM_THREADS" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", str(limit))


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Find the name of the processor, as far as the system reports it."""
    return _value(cpuinfo, "model name") or platform.processor() or platform.machine()


def cpu_features(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Find which instruction sets that kernels use or could use are available on this processor and
    system, by Linux's names; empty if it is not known.
    """
    arm = platform.machine() in ("aarch64", "arm64")
    if sys.platform == "darwin":
        # Every Apple processor for macOS on ARM has these.
        if arm:
            return frozenset({"asimd", "asimddp"})
        return frozenset()
    if arm:
        # /proc/cpuinfo on ARM names these features, but not in a line "flags".
        hwcap = ctypes.CDLL(None).getauxval(ctypes.c_ulong(_HWCAP))
        return frozenset(name for name, bit in _HWCAPS.items() if hwcap >> bit & 1)
    return frozenset(_value(cpuinfo, "flags").split()) & _FEATURES


def _value(cpuinfo: Path, key: str) -> str:
    """Read the value of a line of the first processor; empty if there is no such line."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return ""
    match = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1] if match else ""
