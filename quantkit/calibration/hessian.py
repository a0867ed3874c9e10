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
        pairs: how many inputs have a known counterpart: in this process, after `finish` in all.
    """

    def __init__(self, width: int, drift_width: int, device: torch.device) -> None:
        self.hessian: Tensor | None = None
        self.paired = torch.zeros(width, width, device=device)
        self.drift = torch.zeros(drift_width, width, device=device)
        self.pairs = 0
        self._unpaired, self._inputs, self._differences = _Columns(), _Columns(), _Columns()

    def add(self, inputs: Tensor) -> None:
        """Take up inputs [..., I]."""
        rows = inputs.flatten(0, -2)
        while len(rows):
            rows = self._unpaired.fill(rows)
            if self._unpaired.full:
                self._sum_unpaired()

    def add_pair(self, inputs: Tensor, difference: Tensor | None) -> None:
        """Take up inputs [..., I] and how far the unquantized model is from them, [..., R]; None, which is then so for
        all, is not at all."""
        rows = inputs.flatten(0, -2)
        self.pairs += len(rows)
        apart = None if difference is None else difference.flatten(0, -2)
        while len(rows):
            rows = self._inputs.fill(rows)
            apart = None if apart is None else self._differences.fill(apart)
            if self._inputs.full:
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
        for waiting in (self._unpaired, self._inputs, self._differences):
            waiting.forget()
        counts = torch.tensor([int(self.hessian is not None), self.pairs], device=self.paired.device)
        group.sum_(counts)
        unpaired, self.pairs = counts.tolist()
        if unpaired:
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
                self.drift.add_(times(difference, x.t()))

    @staticmethod
    def _gather(sums: Tensor, group: ProcessGroup) -> None:
        group.sum_(sums)
        fill_lower_(sums)


class _Columns:
    """Rows [N, I] that wait, as columns, until they are so many that the sums, which are large, are read and written
    seldom."""

    def __init__(self) -> None:
        self._columns: Tensor | None = None
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count == _TOGETHER

    def fill(self, rows: Tensor) -> Tensor:
        """Keep as many rows as there is room for; the others."""
        if self._columns is None:
            self._columns = rows.new_empty(rows.shape[1], _TOGETHER)
        kept = min(len(rows), _TOGETHER - self._count)
        self._columns[:, self._count : self._count + kept] = rows[:kept].t()
        self._count += kept
        return rows[kept:]

    def taken(self) -> Tensor | None:
        """All rows as columns [I, N], until more are kept; None if there are none."""
        count, self._count = self._count, 0
        return None if self._columns is None or count == 0 else self._columns[:, :count]

    def forget(self) -> None:
        """Let go of the memory."""
        self._columns = None
