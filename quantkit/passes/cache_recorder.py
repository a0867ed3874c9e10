"""Record the largest keys and values that a model's attention would store in a cache."""

from __future__ import annotations

import torch
from torch import Tensor


class CacheRecorder:
    """The largest absolute key and value of each layer, over all batches that were recorded.

    Attributes:
        active: whether keys and values are recorded.
        largest: by layer, float32 [2]: of the keys and of the values; NaN after any NaN.
    """

    def __init__(self) -> None:
        self.active = True
        self.largest: dict[int, Tensor] = {}

    def record(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Raise a layer's maxima to those of keys and values of any shape."""
        if not self.active:
            return
        maxima = torch.stack((keys.abs().amax().float(), values.abs().amax().float()))
        if layer in self.largest:
            # `torch.maximum` propagates NaN, so that it is not lost in later batches.
            maxima = torch.maximum(self.largest[layer], maxima)
        self.largest[layer] = maxima
