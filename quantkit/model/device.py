"""Where models and solvers compute."""

from __future__ import annotations

import torch

from quantkit.errors import RequestError


def usable_device(name: str | torch.device | None) -> torch.device:
    """A device by torch's name for it, if numbers can be put there and read back; for None a GPU if there is one.

    Raises:
        RequestError: if not.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # all these are torch's ways to say no
        raise RequestError("the device cannot be used", found=name, expected="cpu, or cuda with a GPU") from error
    return device
