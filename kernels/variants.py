"""The instruction sets that the C++ kernels are compiled for, and those that this machine has."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from quantkit.base.processors import cpu_features


@dataclass(frozen=True)
class Variant:
    """An instruction set.

    Attributes:
        flags: of the compiler.
        features: that a processor must have, see `cpu_features`.
    """

    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")
VARIANTS = {
    "avx512-bf16": Variant((*_AVX512_FLAGS, "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    "avx512-vnni": Variant(_AVX512_FLAGS, _AVX512),
    "avx2": Variant(("-march=x86-64-v3",), _AVX2),
    "neon-dotprod": Variant(("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
    "neon": Variant(("-march=armv8-a",), frozenset({"asimd"})),
    "portable": Variant(("-DQUANTKIT_PORTABLE",)),
}
"""Fastest first; the names are what the kernels call themselves."""


@functools.cache
def runs_here(name: str) -> bool:
    """Check whether this machine has the instruction set."""
    # Once: every step of GPTQ asks, and the system takes long to list the features.
    return VARIANTS[name].features <= cpu_features()
