"""Where models and solvers compute, and in which float type."""

from __future__ import annotations

import torch

from quantkit.errors import RequestError
from quantkit.tensors.dtypes import FloatName, float_name


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


def float_type(dtype: FloatName | torch.dtype | None) -> torch.dtype | None:
    """What `float_name` finds, as torch's own."""
    named = float_name(dtype)
    return None if named is None else named.torch
