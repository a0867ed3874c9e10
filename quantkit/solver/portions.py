"""How much the solver processes at a time: on a CPU as much as its caches hold, on a GPU as much as its memory."""

from __future__ import annotations

import torch

WEIGHTS_AT_ONCE = 1 << 22
_DIVIDED_AT_ONCE = 1 << 23
_GPU_WEIGHTS = 1 << 28
_GPU_BYTES = 80  # of GPU memory for each weight: twice what the solver needs

_REFIT_BYTES = 1 << 26
_SEARCHED = 1 << 15  # weights; torch computes on as few in one thread


def weights_at_once(device: torch.device) -> int:
    """Weights of a layer that are solved together; on a GPU they depend on its total memory, so that runs are equal."""
    if device.type != "cuda":
        return WEIGHTS_AT_ONCE
    fitting = torch.cuda.get_device_properties(device).total_memory // _GPU_BYTES
    return min(_GPU_WEIGHTS, 1 << (fitting.bit_length() - 1))


def max_divided_elements(device: torch.device) -> int:
    """Elements that are divided by a Hessian together; its factor is read twice for each portion."""
    return weights_at_once(device) // 2 if device.type == "cuda" else _DIVIDED_AT_ONCE


def refit_bytes(device: torch.device) -> int:
    """Bytes of the least-squares systems that fit the scales of some rows."""
    return 2 * weights_at_once(device) if device.type == "cuda" else _REFIT_BYTES


def searched_weights(device: torch.device) -> int:
    """Weights whose scales are searched together."""
    return weights_at_once(device) // 8 if device.type == "cuda" else _SEARCHED
