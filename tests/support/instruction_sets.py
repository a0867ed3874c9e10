"""The CPU kernels of this machine and the dtypes that they compute in."""

from __future__ import annotations

import torch

from quantkit.kernels.variants import VARIANTS, runs_here

HERE = [name for name in VARIANTS if runs_here(name)]
"""The kernels that this machine can run."""


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
