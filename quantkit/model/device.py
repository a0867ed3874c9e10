"""Where models and solvers compute."""

from __future__ import annotations

import torch

from quantkit.errors import RequestError


def usable_device(name: str | torch.device) -> torch.device:
    """A device by torch's name for it, if numbers can be put there and read back.

    Raises:
        RequestError: if not.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # all these are torch's ways to say no
        raise RequestError("the device cannot be used", found=name, expected="cpu, or cuda with a GPU") from error
    return device
