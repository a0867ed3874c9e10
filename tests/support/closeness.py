"""Compare tensors of one of many cases, and name the case that fails."""

from __future__ import annotations

import torch
from torch import Tensor


def require_close(
    actual: Tensor, expected: Tensor, case: object, *, rtol: float, atol: float
) -> None:
    """Require that two tensors are close, as `torch.testing.assert_close` does.

    Args:
        actual, expected: tensors of one shape and dtype.
        case: what is compared; the error names it.
        rtol, atol: the relative and the absolute tolerance.
    """
    __tracebackhide__ = True
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, msg=lambda text: f"{case}: {text}"
    )
