"""Record the largest keys and values that a model's attention stores in a cache."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor


class CacheRecorder:
    """The largest absolute key and value of each attention module, by its name on disk.

    Attributes:
        active: whether keys and values are recorded.
        counts: how many times each module has cached some.
    """

    def __init__(self) -> None:
        self.active = True
        self.counts: Counter[str] = Counter()
        self._largest: dict[str, Tensor] = {}

    def record(self, attention: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Raise the maxima of a module to those of keys and values of any shape, and return both
        unchanged.
        """
        if self.active:
            self.counts[attention] += 1
            maxima = torch.stack((keys.abs().amax().float(), values.abs().amax().float()))
            if attention in self._largest:
                # `torch.maximum` propagates NaN, so that it is not lost in later batches.
                maxima = torch.maximum(self._largest[attention], maxima)
            self._largest[attention] = maxima
        return keys, values

    def find_largest(self, attention: str) -> Tensor:
        """Return the largest key and value, float32 [2], of a module that has cached some; NaN
        after any NaN. Those of several processes are merged by their maximum.
        """
        return self._largest[attention]
