"""Devices and float types that models and solvers compute with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.base.arguments import wrong_type
from quantkit.base.memory import available_bytes
from quantkit.errors import RequestError
from quantkit.tensors.dtypes import FloatName, float_name


def resolve_device(name: str | torch.device | None) -> torch.device:
    """Check a device, by torch's name for it, by writing and reading a number; for None choose a
    GPU if there is one.

    Raises:
        RequestError: if the device cannot be used.
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
        # Torch raises any of these: for unknown names, builds without the device, missing drivers.
        raise RequestError(
            "the device cannot be used", found=name, expected="cpu, or cuda with a GPU"
        ) from error
    return device


def free_bytes(device: torch.device) -> int:
    """Measure the memory of a device that is free for tensors."""
    if device.type != "cuda":
        return available_bytes()
    # torch reserves memory for later tensors, which the driver does not report as free.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def to_torch_dtype(dtype: FloatName | torch.dtype | None) -> torch.dtype | None:
    """Convert the result of `float_name` to torch's type."""
    name = float_name(dtype)
    if name is None:
        return None
    return name.torch


def copy_integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers to a device, without waiting for a GPU."""
    on_host = torch.tensor(values, dtype=torch.long)
    if device.type == "cuda":
        # Only copies from pinned memory are asynchronous.
        return on_host.pin_memory().to(device, non_blocking=True)
    return on_host.to(device)


def check_token_ids(tokens: object, vocab_size: int) -> Tensor:
    """Convert token ids to a tensor [T] or [B, T]; raises `RequestError` if one is not in the
    vocabulary.
    """
    expected = f"token ids from 0 to {vocab_size - 1}, [T] or [B, T]"
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise wrong_type("tokens", tokens, expected) from error
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() not in (1, 2):
        raise wrong_type("tokens", tokens, expected)
    # An empty tensor has no minimum.
    if not ids.numel():
        return ids
    for extreme in (ids.min(), ids.max()):
        if not 0 <= extreme < vocab_size:
            raise RequestError(
                "`tokens` holds an id outside the vocabulary", found=int(extreme), expected=expected
            )
    return ids


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host; a copy from a GPU is complete only after an event that is recorded
    later.
    """
    if tensor.device.type != "cuda":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
