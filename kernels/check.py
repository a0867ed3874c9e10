"""Try a backend on a small weight before it is trusted with a model.

Kernels are compiled where they run, by compilers that no test has seen; one that gets them
wrong must not be found out by what the model says.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quantkit.kernels.backend import Backend
from quantkit.qtensor import QuantTensor
from quantkit.scheme import QuantScheme

TOLERANCE = 0.03
"""Of the size of what is right: above any mode's rounding, and below any mistake."""

_ROWS = 37
_TOKENS = (1, 4, 23, 600)  # for each of which a backend may have kernels: 23 is 16 + 4 + 2 + 1, and 600 ends in 8


@functools.cache
def fault(backend: Backend, scheme: QuantScheme, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with a backend's products of activations of `dtype`; None if they are right."""
    weight = _example(scheme).to(device)
    columns = weight.shape[1]
    bias = _wave(_ROWS).to(device, dtype)
    try:
        prepared = backend.prepare(weight)
        for tokens in _TOKENS:
            x = _wave(tokens * columns).view(tokens, columns).to(device, dtype)
            found = backend.linear(x, prepared, scheme, _ROWS, bias)
            if not same(found, x.double() @ weight.dequantize().double().t() + bias.double()):
                return f"its products of {tokens} tokens are wrong on this machine"
    except Exception as error:  # of a driver or a compiler, which have kinds of their own
        return f"it fails on this machine: {' '.join(str(error).split()) or type(error).__name__}"[:300]
    return None


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are one but for rounding; false if they are not finite."""
    error = (found.double() - expected.double()).norm()
    return bool(error <= TOLERANCE * expected.double().norm())


def _example(scheme: QuantScheme) -> QuantTensor:
    """A weight with every code in it, scales of many sizes and all zero points."""
    columns = 2 * scheme.group_size if scheme.group_size else 72
    groups = scheme.groups(columns)
    codes = (torch.arange(_ROWS * columns) * 37 + 11) % scheme.levels
    scale = 0.01 + _wave(_ROWS * groups).abs()
    zero = None
    if not scheme.symmetric:
        zero = ((torch.arange(_ROWS * groups) * 5 + 3) % scheme.levels).to(torch.uint8).view(_ROWS, groups)
    return QuantTensor(codes.to(torch.uint8).view(_ROWS, columns), scale.view(_ROWS, groups), zero, scheme)


def _wave(count: int) -> Tensor:
    """Numbers that look random, without a generator."""
    return torch.sin(torch.arange(count, dtype=torch.float64).square()).float()
