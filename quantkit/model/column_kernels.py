"""The device's kernels for the solver's loops over columns, checked on a small layer before they
are used.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.kernels import cpu_gptq
from quantkit.kernels.library import load_kernels
from quantkit.kernels.triton_backend import TritonBackend
from quantkit.solver.columns import TORCH, ColumnKernels
from quantkit.solver.gptq import Damped, solve
from quantkit.solver.grid import FINE, list_trial_steps, search_scales
from quantkit.tensors.scheme import QuantScheme

# in one call
_CPU_COLUMNS = 128
_GPU_COLUMNS = 32
# More than one program has.
_ROWS = 40
# More than a panel has.
_COLUMNS = 288
_SCHEMES = ("int4-g32", "int4-g32-asym")
_TOLERANCE = (
    0.01  # of the output error; codes may differ where two are equally good, and later ones follow
)
_log = logging.getLogger(__name__)


@functools.cache
def column_kernels(device: torch.device) -> ColumnKernels:
    """Return the kernels of a device; if torch replaces them, a warning is logged. An unknown
    variant of the CPU kernels is a `RequestError`.
    """
    on_cpu = device.type == "cpu"
    if on_cpu:
        wrong = None
    else:
        wrong = TritonBackend().explain_unsupported(QuantScheme(8, None), device, torch.float32)
    if wrong is None:
        try:
            if on_cpu:
                kernels = cpu_kernels()
            else:
                kernels = gpu_kernels()
            wrong = _what_is_wrong(kernels, device)
        except RequestError:
            raise
        except Exception as error:  # of a driver or a compiler, which have their own types
            wrong = (" ".join(str(error).split()) or type(error).__name__)[:300]
        if wrong is None:
            return kernels
    if on_cpu:
        slower = "2 to 5 times slower"
    else:
        slower = "slower"
    _log.warning("int4 rounding and GPTQ run without kernels on %s, %s; %s", device, slower, wrong)
    return TORCH


def kernels_name(device: torch.device) -> str:
    """Return what rounds columns on a device: ``torch``, ``triton`` or the name of the CPU
    kernels.
    """
    if column_kernels(device) is TORCH:
        return "torch"
    if device.type == "cpu":
        return load_kernels().name
    return "triton"


def cpu_kernels() -> ColumnKernels:
    """Return the C++ kernels, which are compiled when they are first called."""

    def search(
        weight: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        return cpu_gptq.search_scales(
            weight.contiguous(),
            importance.contiguous(),
            len(weight) // scheme.groups(len(weight)),
            scheme.levels,
            scheme.symmetric,
            scale_dtype,
            list_trial_steps(scheme),
            FINE,
        )

    return ColumnKernels(search, cpu_gptq.round_in_turn, cpu_gptq.improve_in_turn, _CPU_COLUMNS)


def gpu_kernels() -> ColumnKernels:
    """Return the Triton kernels; scales are searched by torch."""
    from quantkit.kernels import triton_gptq

    return ColumnKernels(
        search_scales, triton_gptq.round_in_turn, triton_gptq.improve_in_turn, _GPU_COLUMNS
    )


def _what_is_wrong(kernels: ColumnKernels, device: torch.device) -> str | None:
    """Return how the kernels are wrong on a small layer; None if they are not."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * _COLUMNS, _COLUMNS, generator=generator).cumsum(1)
    weight = torch.randn(_ROWS, _COLUMNS, generator=generator).to(device)
    hessian = Damped.of_((inputs.t() @ inputs).to(device))
    for name in _SCHEMES:
        scheme = QuantScheme.parse(name)
        (_, found), (_, expected) = (
            solve(weight, hessian, scheme, torch.bfloat16, kernels=one) for one in (kernels, TORCH)
        )
        if not abs(found.output_error / expected.output_error - 1) <= _TOLERANCE:
            return (
                f"their output error is {found.output_error:.4g}, that of torch"
                f" {expected.output_error:.4g}"
            )
    return None
