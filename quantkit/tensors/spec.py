"""What is known of a tensor before it is there."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.tensors.dtypes import DType
from quantkit.tensors.scheme import QuantScheme


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model: canonical name, shape, float dtype (of the scales, if quantized), and scheme if any."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    scheme: QuantScheme | None = None
