"""What the solver needs to know of a layer's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.calibration.ranks import Ranks

_STRIPS = 4


class InputStatistics:
    """Sums over the inputs X [N, I] of a layer.

    Attributes:
        hessian: [I, I] float32, ``X.T @ X``; whole after `finish`.
        drift: [I, I] float32, ``(X_float - X).T @ X``, where X_float are the inputs of the
            unquantized model; gathered from some of the inputs and scaled to all.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.hessian = torch.zeros(width, width, device=device)
        self.drift = torch.zeros(width, width, device=device)
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor) -> None:
        """Take up inputs [..., I]: only one triangle, in strips, since the sum is symmetric."""
        x = inputs.flatten(0, -2)
        self._counts[0] += x.shape[0]
        width = x.shape[1]
        step = -(-width // _STRIPS)
        for start in range(0, width, step):
            self.hessian[start : start + step, start:].addmm_(x[:, start : start + step].t(), x[:, start:])

    def add_drift(self, inputs: Tensor, reference: Tensor) -> None:
        """Take up what the unquantized model's layer sees in the place of `inputs`, both [..., I]."""
        x = inputs.flatten(0, -2)
        self._counts[1] += x.shape[0]
        self.drift.addmm_((reference.flatten(0, -2) - x).t(), x)

    def finish(self, ranks: Ranks) -> None:
        """Add up what all processes gathered, and fill in the other triangle."""
        for sums in (self.hessian, self.drift, self._counts):
            ranks.add_up_(sums)
        step = -(-self.hessian.shape[0] // _STRIPS)
        for start in range(0, self.hessian.shape[0], step):
            stop = start + step
            self.hessian[stop:, start:stop] = self.hessian[start:stop, stop:].t()
        self.drift *= (self._counts[0] / self._counts[1].clamp(min=1)).item()
