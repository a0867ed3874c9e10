"""The CPU kernels in one line, for bug reports."""

from __future__ import annotations

import os

from quantkit.kernels.build import VARIANT_SETTING, VARIANTS, cache_folder


def describe_kernels() -> str:
    """Which CPU kernels this process uses and whether they are compiled, or why there are none. Compiles nothing."""
    variant = os.environ.get(VARIANT_SETTING, "native")
    if variant not in VARIANTS:
        return f"none: {VARIANT_SETTING} is not one of {', '.join(VARIANTS)}"
    if any(cache_folder().glob(f"quantkit_cpu_{variant}-*.so")):
        return f"{variant} instructions, compiled"
    return f"{variant} instructions, not compiled yet: the first use needs a C++ compiler"
