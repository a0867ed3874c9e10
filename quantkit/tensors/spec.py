"""What is known of a tensor before it is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quantkit.tensors.scheme import QuantScheme


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model: canonical name, shape, float dtype (of the scales, if quantized), and scheme if any."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: QuantScheme | None = None
