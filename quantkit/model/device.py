"""Devices and float types that models and solvers compute with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.base.arguments import wrong_type
from quantkit.base.memory import available_bytes
from quantkit.errors import RequestError
from quantkit.tensors.dtypes import FloatName, float_name


def usable_device(name: str | torch.device | None) -> torch.device:
    """Return a device by torch's name for it, checked by writing and reading a number; for None a
    GPU if there is one.

    Raises:
        RequestError: if not.
    """
    if name is None:
        if torch.cuda.is_available():
            name = "cuda"
        else:
            name = "cpu"
    if not isinstance(name, str | torch.device):
        raise wrong_type("device", name, "a name such as cpu or cuda:0")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        # Torch raises any of these.
        raise RequestError(
            "the device cannot be used", found=name, expected="cpu, or cuda with a GPU"
        ) from error
    return device


def free_bytes(device: torch.device) -> int:
    """Memory that a device has left for tensors."""
    if device.type != "cuda":
        return available_bytes()
    # By torch, for later tensors.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def float_type(dtype: FloatName | torch.dtype | None) -> torch.dtype | None:
    """`float_name` as torch's type."""
    named = float_name(dtype)
    if named is None:
        return None
    return named.torch


def numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers on a device, without waiting for a GPU."""
    found = torch.tensor(values, dtype=torch.long)
    if device.type == "cuda":
        return found.pin_memory().to(device, non_blocking=True)
    return found.to(device)


def check_token_ids(tokens: object, vocab_size: int) -> Tensor:
    """Token ids [T] or [B, T]; raises `RequestError` if they are not of the vocabulary."""
    expected = f"token ids from 0 to {vocab_size - 1}, [T] or [B, T]"
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise wrong_type("tokens", tokens, expected) from error
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() not in (1, 2):
        raise wrong_type("tokens", tokens, expected)
    for one in (ids.min(), ids.max()) if ids.numel() else ():
        if not 0 <= one < vocab_size:
            raise RequestError(
                "`tokens` holds an id outside the vocabulary", found=int(one), expected=expected
            )
    return ids


def host_copy(tensor: Tensor) -> Tensor:
    """Return a tensor on the host; one from a GPU holds its values once an event that is recorded
    later has happened.
    """
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
