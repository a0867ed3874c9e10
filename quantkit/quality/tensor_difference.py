"""How far one tensor of a model is from its counterpart in another, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.quality.bounds import BOUNDS, Bound, coarser, same_bits, same_but_rounded, type_name, weight_bound
from quantkit.quality.transcoded import equal_as_numbers
from quantkit.tensors.qtensor import QuantTensor, float_rows, frobenius, row_chunks
from quantkit.tensors.scheme import QuantScheme


@dataclass(frozen=True)
class TensorDifference:
    """How far one tensor is from its counterpart: Frobenius norms, and the largest element."""

    name: str
    relative_error: float
    largest: float
    bound: float

    @property
    def within(self) -> bool:
        return self.relative_error <= self.bound

    @property
    def excess(self) -> float:
        """The error in units of its bound; infinite where none is allowed, or it is NaN."""
        if math.isnan(self.relative_error) or not self.bound:
            return math.inf
        return self.relative_error / self.bound


def tensor_difference(
    name: str, first: Tensor | QuantTensor, second: Tensor | QuantTensor, coarsest: QuantScheme | None
) -> tuple[TensorDifference | None, Bound]:
    """How far a tensor is from its reference, the first one, None if they are equal; and the bound of its type.

    Args:
        coarsest: see `weight_bound`; None for one that is quantized in neither model.
    """
    bound = _bound_between(first, second)
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
        equal = False  # be it that float32 rounds the difference away
    error = norm = largest = 0.0
    for x, y in _float_pieces(first, second):
        norm = math.hypot(norm, frobenius(x))
        if torch.equal(x, y):
            continue
        equal = False
        difference = y - x
        largest = _larger(largest, difference.abs().max().item())
        error = math.hypot(error, frobenius(difference))
    if equal:
        return None, bound
    relative = error / norm if norm else math.inf if error else 0.0
    return TensorDifference(name, relative, largest, _allowed(first, second, relative, coarsest)), bound


def _allowed(
    a: Tensor | QuantTensor, b: Tensor | QuantTensor, error: float, coarsest: QuantScheme | None
) -> float:  # fmt: skip
    """What the relative error of a tensor may be, against its reference `a`; see `weight_bound`."""
    if isinstance(b, QuantTensor):
        return weight_bound(b, a, coarsest or b.scheme)
    if isinstance(a, QuantTensor):
        return weight_bound(a, b, coarsest or a.scheme)
    return error if a.dtype != b.dtype and same_but_rounded(a, b) else 0.0


def _bound_between(a: Tensor | QuantTensor, b: Tensor | QuantTensor) -> Bound:
    """That of the coarser type."""
    return coarser((BOUNDS["float16"], *(BOUNDS[name] for name in (type_name(a), type_name(b)) if name in BOUNDS)))


def _float_pieces(a: Tensor | QuantTensor, b: Tensor | QuantTensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows, columns = a.shape[0], math.prod(a.shape[1:])
    for start, stop in row_chunks(rows, columns):
        yield float_rows(a, start, stop), float_rows(b, start, stop)


def _larger(a: float, b: float) -> float:
    return b if math.isnan(b) else max(a, b)
