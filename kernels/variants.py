"""The instruction sets that the C++ kernels are compiled for, and those that this machine has."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from quantkit.processors import cpu_features


@dataclass(frozen=True)
class Variant:
    """An instruction set.

    Attributes:
        machines: processor architectures, as wheels name them.
        flags: of the compiler.
        features: that a processor must have, see `cpu_features`.
    """

    machines: tuple[str, ...]
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
VARIANTS = {
    "avx512-vnni": Variant(("x86_64",), ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"), _AVX512),
    "avx2": Variant(("x86_64",), ("-march=x86-64-v3",), _AVX2),
    "neon-dotprod": Variant(("aarch64", "arm64"), ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
    "neon": Variant(("aarch64", "arm64"), ("-march=armv8-a",), frozenset({"asimd"})),
    "portable": Variant(("x86_64", "aarch64", "arm64"), ("-DQUANTKIT_PORTABLE",)),
}
"""Fastest first; the names are what the kernels call themselves."""


def runs_here(name: str) -> bool:
    """Whether this machine has the instruction set."""
    variant = VARIANTS[name]
    here = not variant.features or platform.machine() in variant.machines
    return here and variant.features <= cpu_features()
