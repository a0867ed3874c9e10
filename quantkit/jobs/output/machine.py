"""Describe what the results of float arithmetic depend on."""

from __future__ import annotations

import torch

from quantkit.model.column_kernels import kernels_name


def machine(device: torch.device) -> dict[str, object]:
    """Describe what sums of floats depend on, and so do solved and weighted codes."""
    # Each of these changes the order in which floats are added.
    return {
        "torch": torch.__version__,
        "number of threads": torch.get_num_threads(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "column kernels": kernels_name(device),
    }
