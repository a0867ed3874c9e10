"""The instruction sets that the C++ kernels are compiled for, and those that this machine has."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """An instruction set.

    Attributes:
        machines: processor architectures, as wheels name them.
        flags: of the compiler.
        features: that a processor must have, as Linux names them.
    """

    machines: tuple[str, ...]
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
VARIANTS = {
    "avx512-vnni": Variant(("x86_64",), ("-march=x86-64-v4", "-mavx512vnni"), _AVX512),
    "avx2": Variant(("x86_64",), ("-march=x86-64-v3",), _AVX2),
    "neon-dotprod": Variant(("aarch64", "arm64"), ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
    "neon": Variant(("aarch64", "arm64"), ("-march=armv8-a",), frozenset({"asimd"})),
    "portable": Variant(("x86_64", "aarch64", "arm64"), ("-DQUANTKIT_PORTABLE",)),
}
"""Fastest first; the names are what the kernels call themselves."""

_HWCAP, _HWCAPS = 16, {"asimd": 1, "asimddp": 20}  # getauxval's key, and bits of its value (Linux, asm/hwcap.h)


def runs_here(name: str) -> bool:
    """Whether this machine has the instruction set."""
    variant = VARIANTS[name]
    here = not variant.features or platform.machine() in variant.machines
    return here and variant.features <= cpu_features()


@functools.cache
def cpu_features() -> frozenset[str]:
    """What the processor and the operating system offer, as Linux names it; empty where it is not known."""
    arm = platform.machine() in ("aarch64", "arm64")
    if sys.platform == "darwin":
        return frozenset(_HWCAPS) if arm else frozenset()  # every Apple processor for macOS on ARM
    if arm:
        bits = ctypes.CDLL(None).getauxval(ctypes.c_ulong(_HWCAP))
        return frozenset(name for name, bit in _HWCAPS.items() if bits >> bit & 1)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
