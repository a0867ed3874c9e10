"""What the solver needs to know of a layer's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.distributed.group import ProcessGroup
from quantkit.tensors.products import add_square_, fill_lower_, times

_TOGETHER = 2048


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
        self._unpaired, self._inputs, self._differences = _Rows(), _Rows(), _Rows()

    def add(self, inputs: Tensor) -> None:
        """Take up inputs [..., I]."""
        if self._unpaired.append(inputs):
            self._sum_unpaired()

    def add_pair(self, inputs: Tensor, difference: Tensor | None) -> None:
        """Take up inputs [..., I] and how far the unquantized model is from them, [..., R]; None, which is then so for
        all, is not at all."""
        if difference is not None:
            self._differences.append(difference)
        if self._inputs.append(inputs):
            self._sum_pairs()

    def release(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Hessian, paired and drift, which are the caller's from here on."""
        given = self.hessian, self.paired, self.drift
        del self.hessian, self.paired, self.drift
        return given

    def finish(self, group: ProcessGroup) -> None:
        """Add up what all processes gathered."""
        self._sum_unpaired()
        self._sum_pairs()
        unpaired = torch.tensor([float(self.hessian is not None)], device=self.paired.device)
        group.sum_(unpaired)
        if unpaired.any():
            self.hessian = self.paired.clone() if self.hessian is None else self.hessian.add_(self.paired)
            self._gather(self.hessian, group)
        self._gather(self.paired, group)
        group.sum_(self.drift)

    def _sum_unpaired(self) -> None:
        if (x := self._unpaired.taken()) is not None:
            if self.hessian is None:
                self.hessian = torch.zeros_like(self.paired)
            add_square_(self.hessian, x)

    def _sum_pairs(self) -> None:
        x, difference = self._inputs.taken(), self._differences.taken()
        if x is not None:
            add_square_(self.paired, x)
            if difference is not None:
                self.drift.add_(times(difference.t(), x))

    @staticmethod
    def _gather(sums: Tensor, group: ProcessGroup) -> None:
        group.sum_(sums)
        fill_lower_(sums)


class _Rows:
    """Rows that wait until they are so many that the sums, which are large, are read and written seldom."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._count = 0

    def append(self, rows: Tensor) -> bool:
        """Keep rows [..., I]; whether they are enough now."""
        self._parts.append(rows.flatten(0, -2))
        self._count += len(self._parts[-1])
        return self._count >= _TOGETHER

    def taken(self) -> Tensor | None:
        """All rows [N, I], which are forgotten; None if there are none."""
        parts, self._parts, self._count = self._parts, [], 0
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None
