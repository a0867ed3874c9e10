"""The one table of bounds: what a change of type may cost, for the gate and for `verify` alike.

What the gate lets through, `verify` never calls different: both hold a model against its source on the
windows of `windows.py`, with the figures here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.quality.measures import Quality
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor, frobenius, quantize_rtn, relative_error, row_chunks
from quantkit.tensors.scheme import QuantScheme


@dataclass(frozen=True)
class Bound:
    """The most that a type may cost.

    Attributes:
        kl: mean KL(source || result) per token, in nats.
        perplexity_ratio: perplexity over that of the source.
    """

    kl: float
    perplexity_ratio: float


BOUNDS = {
    "float16": Bound(1e-3, 1.01),
    "bfloat16": Bound(1e-3, 1.01),
    "int8": Bound(0.02, 1.02),
    "int4": Bound(0.25, 1.25),
}
"""By type; a pair of models has the bound of the coarsest tensor in which they differ."""

TIMES_ROUNDING = 3.0
"""How many times the error of rounding it to nearest a quantized weight may have (Frobenius norms)."""

MAX_ERROR = 0.9
"""The relative error (Frobenius norms) from which nothing of a weight is left, by whatever method: scales too small for
their type make zeros of all its weights, and rounding in the same scheme loses them as well."""

_LEAST_ERROR = 2.0**-8
"""That a quantized weight may always have: its scales are rounded too."""

ROUNDING_BOUNDS = {"int8": 0.05, "int4": 0.25}
"""What rounding may cost a weight of a model that cannot be run, relative to it (Frobenius norms).

Weights that are spread normally lose 0.01 in rows of int8, and 0.11 in groups of 128 of int4; what loses so much more
has outliers that leave others no steps, and nobody measures what the model makes of that.
"""

REPEATABLE = 0.005
"""By how much a figure may change, relatively, when it is measured again on another machine."""


def type_name(value: Tensor | QuantTensor) -> str:
    """A tensor's type as the table has it: ``float16``, ``int4``, ..."""
    return f"int{value.scheme.bits}" if isinstance(value, QuantTensor) else DType.of(value.dtype)


def coarser(bounds: Iterable[Bound]) -> Bound:
    """The bound that allows most."""
    return max(bounds, key=lambda bound: bound.kl)


def coarsest(schemes: Iterable[QuantScheme]) -> QuantScheme:
    """The scheme of the fewest bits and, of several, of the longest groups."""
    return max(schemes, key=lambda scheme: (-scheme.bits, scheme.group_size or math.inf))


def weight_bound(quantized: QuantTensor, weight: Tensor | QuantTensor, coarsest: QuantScheme) -> float:
    """What the error of a quantized weight [O, I], relative to its reference, may be.

    Of a reference in floats it is so many times what rounding to nearest makes of it in the same scheme: rows with
    outliers, or too small for their scales' type, lose more by any method. Two quantized weights are each about as far
    from what they were made of as their steps say.

    Args:
        coarsest: of the schemes whose losses this weight may make up for: its own, or, where it was solved for the
            inputs that layers before it give, that of all layers.
    """
    scale_dtype = quantized.scale.dtype
    if isinstance(weight, QuantTensor):
        error = max(_step_error(quantized), _step_error(weight))
    else:
        error = relative_error(quantize_rtn(weight, quantized.scheme, scale_dtype), weight)
    scheme = _dividing(coarsest, weight.shape[1])
    if (scheme.bits, scheme.group_size) != (quantized.scheme.bits, quantized.scheme.group_size):
        floats = weight.dequantize() if isinstance(weight, QuantTensor) else weight
        error = max(error, relative_error(quantize_rtn(floats, scheme, scale_dtype), floats))
    return min(MAX_ERROR, max(_LEAST_ERROR, TIMES_ROUNDING * error))


def worst_row(quantized: QuantTensor, weight: Tensor) -> tuple[float, float]:
    """Of a quantized weight [O, I] the row that is farthest beyond what rounding it in its scheme explains: its error
    relative to its norm, and what that may be. NaN where a row holds one."""
    worst, found = -1.0, (0.0, _LEAST_ERROR)
    for start, stop in row_chunks(*quantized.shape):
        rows, reference = quantized.rows(start, stop), weight[start:stop].float()
        rounded = quantize_rtn(reference, rows.scheme, rows.scale.dtype).dequantize()
        norms = _row_norms(reference).clamp(min=torch.finfo(torch.float32).tiny)
        error, least = (_row_norms(one - reference) / norms for one in (rows.dequantize(), rounded))
        bound = (TIMES_ROUNDING * least).clamp(min=_LEAST_ERROR)
        excess, row = torch.max(error / bound, 0)  # NaN is the largest
        if not excess.item() <= worst:
            worst, found = excess.item(), (error[row].item(), bound[row].item())
    return found


def _row_norms(matrix: Tensor) -> Tensor:
    """Of each row, in float64: squares of large values are beyond float32."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64)
    return norms


def _dividing(scheme: QuantScheme, columns: int) -> QuantScheme:
    """A scheme with as few bits whose groups divide a row: losses elsewhere do not depend on the row's length."""
    if scheme.group_size is None or columns % scheme.group_size == 0:
        return scheme
    size = math.gcd(scheme.group_size, columns)
    return replace(scheme, group_size=None if size % 8 else size)


def _step_error(value: QuantTensor) -> float:
    """The relative error of a weight whose values were spread evenly between its steps."""
    rows, columns = value.shape
    squares = value.scale.double().square().sum().item() * (columns // value.scale.shape[1]) / 12
    norm = 0.0
    for start, stop in row_chunks(rows, columns):
        norm = math.hypot(norm, frobenius(value.rows(start, stop).dequantize()))
    return math.sqrt(squares) / norm if norm else 0.0


def same_but_rounded(a: Tensor, b: Tensor) -> bool:
    """Whether one of two tensors of floats is the other in its own, coarser or finer, type; each element of it."""
    return any(
        all(
            torch.equal(first[start:stop].to(second.dtype), second[start:stop])
            for start, stop in row_chunks(len(first), math.prod(first.shape[1:]))
        )
        for first, second in ((a, b), (b, a))
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one type and shape, and equal in every bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(one.contiguous().view(-1).view(torch.uint8) for one in (a, b)))


def exceeds(found: Quality, bound: Bound) -> bool:
    """Whether a model lost more on one text than it may; so it does where a figure is no number.

    The comparison leaves room for figures that are measured again.
    """
    room = 1 + REPEATABLE
    ratio = found.perplexity / found.reference_perplexity
    return not (found.divergence.kl <= room * bound.kl and ratio <= room * bound.perplexity_ratio)
