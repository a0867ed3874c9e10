"""Where models and solvers compute, and in which float type."""

from __future__ import annotations

import torch

from quantkit.errors import RequestError
from quantkit.json_values import shown

_FLOAT_TYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip


def usable_device(name: str | torch.device | None) -> torch.device:
    """A device by torch's name for it, checked by writing and reading a number; for None a GPU if there is one.

    Raises:
        RequestError: if not.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch raises any of these
        raise RequestError("the device cannot be used", found=name, expected="cpu, or cuda with a GPU") from error
    return device


def float_type(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A float type by its name, such as ``bf16`` or ``bfloat16``, or torch's own; None stays None.

    Raises:
        RequestError: for anything else.
    """
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if isinstance(dtype, str) and dtype in _FLOAT_TYPES:
        return _FLOAT_TYPES[dtype]
    raise RequestError("unknown float type", found=shown(dtype), expected=", ".join(_FLOAT_TYPES))
