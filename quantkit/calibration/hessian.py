"""What the solver needs to know of a layer's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.distributed.group import ProcessGroup
from quantkit.tensors.products import add_square_, fill_lower_, times


class HessianAccumulator:
    """Sums over the inputs X [N, I] of a layer.

    Attributes:
        hessian: [I, I] float32, ``X.T @ X``: of those inputs whose counterparts in the unquantized model
            are not known, of all inputs after `finish`; None where there are none without.
        paired: the same of those whose counterparts are known.
        drift: [R, I] float32, ``D.T @ X`` over these, where D [N, R] is how far the unquantized
            model is from this one: in the layer's inputs, or in what the layer would give.
    """

    def __init__(self, width: int, drift_width: int, device: torch.device) -> None:
        self.hessian: Tensor | None = None
        self.paired = torch.zeros(width, width, device=device)
        self.drift = torch.zeros(drift_width, width, device=device)

    def add(self, inputs: Tensor) -> None:
        """Take up inputs [..., I]."""
        if self.hessian is None:
            self.hessian = torch.zeros_like(self.paired)
        add_square_(self.hessian, inputs.flatten(0, -2))

    def add_pair(self, inputs: Tensor, difference: Tensor | None) -> None:
        """Take up inputs [..., I] and how far the unquantized model is from them, [..., R]; None is not at all."""
        x = inputs.flatten(0, -2)
        add_square_(self.paired, x)
        if difference is not None:
            self.drift.add_(times(difference.flatten(0, -2).t(), x))

    def release(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Hessian, paired and drift, which are the caller's from here on."""
        given = self.hessian, self.paired, self.drift
        del self.hessian, self.paired, self.drift
        return given

    def finish(self, group: ProcessGroup) -> None:
        """Add up what all processes gathered."""
        unpaired = torch.tensor([float(self.hessian is not None)], device=self.paired.device)
        group.sum_(unpaired)
        if unpaired.any():
            self.hessian = self.paired.clone() if self.hessian is None else self.hessian.add_(self.paired)
            self._gather(self.hessian, group)
        self._gather(self.paired, group)
        group.sum_(self.drift)

    @staticmethod
    def _gather(sums: Tensor, group: ProcessGroup) -> None:
        group.sum_(sums)
        fill_lower_(sums)
