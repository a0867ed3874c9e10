"""Choose the backend for a case: the first of a fixed table that can serve it."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch

from quantkit.errors import RequestError, UnsupportedError
from quantkit.kernels.backend import Backend, Operations
from quantkit.kernels.check import self_test
from quantkit.kernels.cpu import CpuBackend
from quantkit.kernels.reference import ReferenceBackend
from quantkit.kernels.triton_backend import TritonBackend
from quantkit.tensors.scheme import QuantScheme

BACKENDS: tuple[Backend, ...] = (
    CpuBackend("cpu-exact", exact=True),
    CpuBackend("cpu-fast", exact=False),
    TritonBackend(),
    ReferenceBackend(),
)
"""Fastest first."""

BackendName = Literal["cpu-exact", "cpu-fast", "triton", "reference"]

LAST_RESORT = "reference"
_log = logging.getLogger(__name__)


def select_backend(
    scheme: QuantScheme, device: torch.device, dtype: torch.dtype, scale_dtype: torch.dtype, prefer: str | None = None
) -> Backend:
    """The backend for activations of `dtype` on `device` and weights of `scheme` with scales of `scale_dtype`.

    Args:
        prefer: the only backend to consider, by name.

    Raises:
        RequestError: if no backend has the preferred name.
        UnsupportedError: if none can serve, with every backend's reason.
    """
    candidates = [b for b in BACKENDS if prefer is None or b.name == prefer]
    if not candidates:
        raise RequestError("unknown backend", found=prefer, expected=", ".join(b.name for b in BACKENDS))
    reasons: list[str] = []
    for backend in candidates:
        reason = backend.unsupported_reason(scheme, device, dtype)
        if reason is None and backend.name != LAST_RESORT:
            reason = self_test(backend, scheme, device, dtype, scale_dtype)
        if reason is None:
            if backend.name == LAST_RESORT and reasons:
                _warn_once(f"{scheme} is served by the slow {LAST_RESORT} backend; {'; '.join(reasons)}")
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError(f"no backend serves {scheme} on {device} in {dtype}; {'; '.join(reasons)}")


def operations_for_floats(device: torch.device, dtype: torch.dtype) -> Operations | None:
    """What a GPU's backend offers to a model without quantized layers; None on a CPU, whose kernels would have to be
    compiled first."""
    if device.type == "cpu":
        return None
    for backend in BACKENDS:
        if backend.unsupported_reason(QuantScheme(8, None), device, dtype) is None:
            return backend.operations()
    return None


@functools.cache
def _warn_once(line: str) -> None:
    """Warn once, not for every layer."""
    _log.warning("%s", line)
