"""The one table of bounds: what a change of type may cost, for the gate and for `verify` alike.

What the gate lets through, `verify` never calls different: both hold a model against its source on the
windows of `windows.py`, with the figures here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.checkpoint import DTYPE_NAMES
from quantkit.qtensor import QuantTensor, quantize_rtn, relative_error
from quantkit.quality import Quality


@dataclass(frozen=True)
class Bound:
    """The most that a type may cost.

    Attributes:
        weight_error: relative error of a tensor (Frobenius norms), unless rounding to nearest explains more.
        kl: mean KL(source || result) per token, in nats.
        perplexity_ratio: perplexity over that of the source.
    """

    weight_error: float
    kl: float
    perplexity_ratio: float


BOUNDS = {
    "float16": Bound(2**-10, 1e-3, 1.01),
    "bfloat16": Bound(2**-8, 1e-3, 1.01),
    "int8": Bound(0.05, 0.02, 1.02),
    "int4": Bound(0.5, 0.25, 1.25),
}
"""By type; a pair of models has the bound of the coarsest tensor in which they differ."""

TIMES_ROUNDING = 3.0
"""How many times the error of rounding to nearest a weight may have where that is beyond its bound."""

REPEATABLE = 0.005
"""By how much a figure may change, relatively, when it is measured again on another machine."""


def type_name(value: Tensor | QuantTensor) -> str:
    """A tensor's type as the table has it: ``float16``, ``int4``, ..."""
    return f"int{value.scheme.bits}" if isinstance(value, QuantTensor) else DTYPE_NAMES[value.dtype]


def coarser(bounds: Iterable[Bound]) -> Bound:
    """The bound that allows most."""
    return max(bounds, key=lambda bound: bound.kl)


def weight_bound(quantized: QuantTensor, weight: Tensor, error: float) -> float:
    """What the relative error of a quantized weight [O, I] may be.

    It is the table's or, where `error` is beyond that, so many times what rounding to nearest makes of this very
    weight: rows with outliers, or too small for their scales' type, lose more by any method.
    """
    stated = BOUNDS[type_name(quantized)].weight_error
    if error <= stated:
        return stated
    rounded = quantize_rtn(weight.to(torch.float32), quantized.scheme, quantized.scale.dtype)
    return max(stated, TIMES_ROUNDING * relative_error(rounded, weight))


def exceeds(found: Quality, bound: Bound) -> bool:
    """Whether a model lost more on one text than it may; so it does where a figure is no number.

    The comparison leaves room for figures that are measured again.
    """
    room = 1 + REPEATABLE
    ratio = found.perplexity / found.reference_perplexity
    return not (found.divergence.kl <= room * bound.kl and ratio <= room * bound.perplexity_ratio)
