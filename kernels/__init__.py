"""Quantized matrix products: one named backend per file, chosen by `dispatch`.

To add a backend, add a row here. torch is not imported: the command line lists the names.
"""

from __future__ import annotations

from typing import Literal

BackendName = Literal["cpu-exact", "cpu-fast", "triton", "reference"]

BACKENDS: dict[BackendName, str] = {
    "cpu-exact": "quantkit.kernels.cpu:CPU_EXACT",
    "cpu-fast": "quantkit.kernels.cpu:CPU_FAST",
    "triton": "quantkit.kernels.triton_backend:TRITON",
    "reference": "quantkit.kernels.backend:REFERENCE",
}
"""Where each `Backend` is, ``module:name``, in order of preference: the first that supports a layer
is used. `cpu-exact` precedes `cpu-fast`, which is faster but less exact.
"""
