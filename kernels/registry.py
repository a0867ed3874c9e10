"""The backends by name, fastest first; to add one, add a row. No torch here: the command line lists the names."""

from __future__ import annotations

from typing import Literal

BackendName = Literal["cpu-exact", "cpu-fast", "triton", "reference"]

BACKENDS: dict[BackendName, str] = {
    "cpu-exact": "quantkit.kernels.cpu:CPU_EXACT",
    "cpu-fast": "quantkit.kernels.cpu:CPU_FAST",
    "triton": "quantkit.kernels.triton_backend:TRITON",
    "reference": "quantkit.kernels.reference:REFERENCE",
}
"""Where each `Backend` is: ``module:name``."""
