"""The difference between a tensor and its counterpart in another model, and its bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.quality.bounds import BOUNDS, Bound, coarser, same_bits, same_but_rounded, type_name, weight_bound
from quantkit.quality.transcoded import equal_as_numbers
from quantkit.tensors.qtensor import QuantTensor, float_rows, frobenius, row_chunks
from quantkit.tensors.scheme import QuantScheme


@dataclass(frozen=True)
class TensorDifference:
    """The difference between a tensor and its counterpart: Frobenius norms, and the largest element."""

    name: str
    relative_error: float
    largest: float
    bound: float

    @property
    def within(self) -> bool:
        return self.relative_error <= self.bound

    @property
    def excess(self) -> float:
        """The error in units of its bound; infinite if it is NaN or no error is allowed."""
        if math.isnan(self.relative_error) or not self.bound:
            return math.inf
        return self.relative_error / self.bound


def tensor_difference(
    name: str, first: Tensor | QuantTensor, second: Tensor | QuantTensor, coarsest: QuantScheme | None
) -> tuple[TensorDifference | None, Bound]:
    """The difference between a tensor and its reference, the first one, None if they are equal; and its type's bound.

    Args:
        coarsest: see `weight_bound`; None for one that is quantized in neither model.
    """
    types = type_name(first), type_name(second)
    bound = coarser((BOUNDS["float16"], *(BOUNDS[name] for name in types if name in BOUNDS)))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if same_bits(first, second):
            return None, bound
        if not first.is_floating_point() or not second.is_floating_point():
            return TensorDifference(name, math.inf, math.inf, 0.0), bound
        first, second = (one if one.dim() else one.unsqueeze(0) for one in (first, second))
    equal = True
    if isinstance(first, QuantTensor) and isinstance(second, QuantTensor):
        if equal_as_numbers(first, second):
            return None, bound
        equal = False  # even if the difference is lost in float32
    error = norm = largest = 0.0
    for part in row_chunks(first.shape[0], math.prod(first.shape[1:])):
        x, y = float_rows(first, *part), float_rows(second, *part)
        norm = math.hypot(norm, frobenius(x))
        if torch.equal(x, y):
            continue
        equal = False
        difference = y - x
        element = difference.abs().max().item()
        largest = element if math.isnan(element) else max(largest, element)
        error = math.hypot(error, frobenius(difference))
    if equal:
        return None, bound
    relative = error / norm if norm else math.inf if error else 0.0
    if isinstance(second, QuantTensor):
        allowed = weight_bound(second, first, coarsest or second.scheme)
    elif isinstance(first, QuantTensor):
        allowed = weight_bound(first, second, coarsest or first.scheme)
    else:
        allowed = relative if first.dtype != second.dtype and same_but_rounded(first, second) else 0.0
    return TensorDifference(name, relative, largest, allowed), bound
