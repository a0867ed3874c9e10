"""Selects a backend: the first of `quantkit.kernels.BACKENDS` that supports a case."""

from __future__ import annotations

import functools
import logging
from pkgutil import resolve_name

import torch

from quantkit import kernels
from quantkit.errors import RequestError, UnsupportedError
from quantkit.kernels.backend import Backend, Operations
from quantkit.kernels.check import self_test
from quantkit.tensors.scheme import QuantScheme

BACKENDS: tuple[Backend, ...] = tuple(map(resolve_name, kernels.BACKENDS.values()))
"""Fastest first."""

LAST_RESORT = "reference"
_log = logging.getLogger(__name__)


def require_backend(name: str | None) -> None:
    """
    Raises:
        RequestError: if no backend has the name; None stands for any backend.
    """
    if name is not None and name not in [backend.name for backend in BACKENDS]:
        raise RequestError("unknown backend", found=name, expected=", ".join(b.name for b in BACKENDS))


def select_backend(
    scheme: QuantScheme, device: torch.device, dtype: torch.dtype, scale_dtype: torch.dtype, prefer: str | None = None
) -> Backend:
    """The backend for activations of `dtype` on `device` and weights of `scheme` with scales of `scale_dtype`.

    Args:
        prefer: the only backend to consider, by name.

    Raises:
        RequestError: if no backend has the preferred name.
        UnsupportedError: if none supports the case, with every backend's reason.
    """
    require_backend(prefer)
    candidates = [b for b in BACKENDS if prefer is None or b.name == prefer]
    reasons: list[str] = []
    for backend in candidates:
        reason = backend.unsupported_reason(scheme, device, dtype)
        if reason is None and backend.name != LAST_RESORT:
            reason = self_test(backend, scheme, device, dtype, scale_dtype)
        if reason is None:
            if backend.name == LAST_RESORT and reasons:
                _warn_once(f"{scheme} runs on the slow {LAST_RESORT} backend; {'; '.join(reasons)}")
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError(f"no backend supports {scheme} on {device} in {dtype}; {'; '.join(reasons)}")


def operations_for_floats(device: torch.device, dtype: torch.dtype) -> Operations | None:
    """What a GPU's backend provides for a model without quantized layers; None on a CPU, where kernels would have to be
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
