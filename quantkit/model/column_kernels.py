"""Select the device's kernels for the solver's loops over columns, and check them on a small layer
before they are used.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.base.foreign_errors import describe_foreign_error
from quantkit.base.late import LateModule
from quantkit.errors import RequestError
from quantkit.kernels import cpu_gptq
from quantkit.kernels.library import load_kernels
from quantkit.solver.columns import TORCH, ColumnKernels
from quantkit.solver.gptq import Damped, solve
from quantkit.solver.grid import list_trial_steps, search_scales
from quantkit.tensors.code_table import find_table
from quantkit.tensors.scheme import QuantScheme

if TYPE_CHECKING:
    from quantkit.kernels import triton_backend
else:
    triton_backend = LateModule("quantkit.kernels.triton_backend")

# Columns that the kernels round in one call.
_CPU_COLUMNS = 128
_GPU_COLUMNS = 32
# More rows than one Triton program processes, so that the test covers several programs.
_ROWS = 40
# More columns than a panel has, so that the test covers the update between panels.
_COLUMNS = 288
_SCHEMES = ("int4-g32", "int4-g32-asym", "iq4_nl")
# Of the output error. Codes are not compared: where two are equally good, kernels may choose the
# other one, and GPTQ carries the difference into all later columns.
_TOLERANCE = 0.01
_log = logging.getLogger(__name__)


@functools.cache
def select_column_kernels(device: torch.device) -> ColumnKernels:
    """Load and test the kernels of a device; if torch replaces them, a warning is logged. An
    unknown variant of the CPU kernels is a `RequestError`.
    """
    on_cpu = device.type == "cpu"
    if on_cpu:
        problem = None
    else:
        # Any scheme will do: this asks whether Triton runs on the device at all.
        problem = triton_backend.TritonBackend().explain_unsupported(
            QuantScheme(8, None), device, torch.float32
        )
    if problem is None:
        try:
            if on_cpu:
                kernels = make_cpu_kernels()
            else:
                kernels = make_gpu_kernels()
            problem = _describe_mismatch(kernels, device)
        except RequestError:
            raise
        except Exception as error:
            # Drivers and compilers have their own exception types.
            problem = describe_foreign_error(error)
        if problem is None:
            return kernels
    if on_cpu:
        slower = "2 to 5 times slower"
    else:
        slower = "slower"
    _log.warning(
        "int4 rounding and GPTQ run without kernels on %s, %s; %s", device, slower, problem
    )
    return TORCH


def kernels_name(device: torch.device) -> str:
    """Name the kernels of a device: ``torch``, ``triton`` or the name of the CPU kernels."""
    if select_column_kernels(device) is TORCH:
        return "torch"
    if device.type == "cpu":
        return load_kernels().name
    return "triton"


def make_cpu_kernels() -> ColumnKernels:
    """Return the C++ kernels, which are compiled when they are first called."""

    def search(
        weight: Tensor, importance: Tensor, scheme: QuantScheme, scale_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        coarse, fine = list_trial_steps(scheme)
        return cpu_gptq.search_scales(
            weight.contiguous(),
            importance.contiguous(),
            len(weight) // scheme.groups(len(weight)),
            scheme.levels,
            find_table(scheme.codes, weight.device),
            scheme.symmetric,
            scale_dtype,
            coarse,
            fine,
        )

    return ColumnKernels(search, cpu_gptq.round_in_turn, cpu_gptq.improve_in_turn, _CPU_COLUMNS)


def make_gpu_kernels() -> ColumnKernels:
    """Return the Triton kernels; scales are searched by torch."""
    from quantkit.kernels import triton_gptq

    return ColumnKernels(
        search_scales, triton_gptq.round_in_turn, triton_gptq.improve_in_turn, _GPU_COLUMNS
    )


def _describe_mismatch(kernels: ColumnKernels, device: torch.device) -> str | None:
    """Compare the kernels with torch on a small layer and describe an error, if any."""
    generator = torch.Generator().manual_seed(0)
    # The cumulative sum correlates neighbouring columns, so errors carried between them matter.
    inputs = torch.randn(2 * _COLUMNS, _COLUMNS, generator=generator).cumsum(1)
    weight = torch.randn(_ROWS, _COLUMNS, generator=generator).to(device)
    hessian = Damped.of_((inputs.t() @ inputs).to(device))
    for name in _SCHEMES:
        scheme = QuantScheme.parse(name)
        _, actual = solve(weight, hessian, scheme, torch.bfloat16, kernels=kernels)
        _, expected = solve(weight, hessian, scheme, torch.bfloat16, kernels=TORCH)
        # Not `>`, which is false for NaN.
        if not abs(actual.output_error / expected.output_error - 1) <= _TOLERANCE:
            return (
                f"their output error is {actual.output_error:.4g}, that of torch"
                f" {expected.output_error:.4g}"
            )
    return None
