"""What is known of a tensor before it is read."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model.

    Attributes:
        name: canonical.
        shape: of the weights, however they are stored.
        dtype: of the floats; of the scales, where it is quantized.
        scheme: of its codes; None if it is read as floats.
        stored_as: what people call the integers that such floats are made of, where their codes are
            not carried: ``Q4_K``, ``NF4``; None for floats. FP8 and MXFP4 count as floats.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    scheme: QuantScheme | None = None
    stored_as: str | None = None
