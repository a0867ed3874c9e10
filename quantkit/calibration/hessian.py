"""What the solver needs to know of a layer's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.distributed.group import ProcessGroup

_STRIPS = 4


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
        _add_square(self.hessian, inputs.flatten(0, -2))

    def add_pair(self, inputs: Tensor, difference: Tensor) -> None:
        """Take up inputs [..., I] and how far the unquantized model is from them, [..., R]."""
        x = inputs.flatten(0, -2)
        _add_square(self.paired, x)
        self.drift.addmm_(difference.flatten(0, -2).t(), x)

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
        _fill_lower(sums)


def _add_square(total: Tensor, x: Tensor) -> None:
    """Add ``x.T @ x``, only the upper triangle in strips, since it is symmetric."""
    width = x.shape[1]
    step = -(-width // _STRIPS)
    for start in range(0, width, step):
        total[start : start + step, start:].addmm_(x[:, start : start + step].t(), x[:, start:])


def _fill_lower(total: Tensor) -> None:
    step = -(-total.shape[0] // _STRIPS)
    for start in range(0, total.shape[0], step):
        stop = start + step
        total[stop:, start:stop] = total[start:stop, stop:].t()
