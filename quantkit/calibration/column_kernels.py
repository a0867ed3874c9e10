"""Kernels for the solver's loops over columns: where a card has them, and only once they have been tried there."""

from __future__ import annotations

import functools
import logging

import torch

from quantkit.kernels.triton_backend import TritonBackend
from quantkit.solver.gptq import gptq
from quantkit.solver.panels import ColumnKernels
from quantkit.tensors.scheme import QuantScheme

_ROWS = 40  # more than a program's
_COLUMNS = {"cuda": 160}  # more than a panel, but where Triton interprets
_FEW_COLUMNS = 32
_SCHEMES = ("int4-g32", "int4-g32-asym")
_TOLERANCE = 1e-3  # of the output error; a code may differ where two are as good
_log = logging.getLogger(__name__)


@functools.cache
def column_kernels(device: torch.device) -> ColumnKernels | None:
    """The kernels of a device; None leaves the columns to torch, which is a warning where a card should have some."""
    if TritonBackend().unsupported_reason(QuantScheme(8, None), device, torch.float32) is not None:
        return None
    try:
        from quantkit.kernels import triton_gptq

        wrong = _what_is_wrong(triton_gptq, device)
    except Exception as error:  # of a driver or a compiler, which have kinds of their own
        wrong = f"they fail: {' '.join(str(error).split()) or type(error).__name__}"[:300]
    if wrong is None:
        return triton_gptq
    _log.warning("GPTQ does without its kernels on %s, which takes longer; %s", device, wrong)
    return None


def _what_is_wrong(kernels: ColumnKernels, device: torch.device) -> str | None:
    """What a small layer tells about kernels; None is nothing."""
    generator = torch.Generator().manual_seed(0)
    columns = _COLUMNS.get(device.type, _FEW_COLUMNS)
    inputs = torch.randn(2 * columns, columns, generator=generator).cumsum(1)
    weight = torch.randn(_ROWS, columns, generator=generator).to(device)
    hessian = (inputs.t() @ inputs).to(device)
    for name in _SCHEMES:
        scheme = QuantScheme.parse(name)
        (_, found), (_, expected) = (
            gptq(weight, hessian, scheme, torch.float32, kernels=one) for one in (kernels, None)
        )
        if not abs(found.output_error / expected.output_error - 1) <= _TOLERANCE:
            return f"their output error is {found.output_error:.4g}, that of torch {expected.output_error:.4g}"
    return None
