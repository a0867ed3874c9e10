"""Sums over a layer's inputs, for the solver."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.distributed.group import ProcessGroup
from quantkit.tensors.products import add_square_, fill_lower_, times

ROWS_AT_ONCE = 2048


class HessianAccumulator:
    """Sums over the inputs X [N, I] of a layer.

    Attributes:
        hessian: [I, I] float32, ``X.T @ X`` over the inputs whose counterparts in the unquantized
            model are not known; None if all counterparts are known.
        paired: the same over the inputs whose counterparts are known.
        drift: [R, I] float32, ``D.T @ X`` over these, where D [N, R] is the difference between the
            unquantized model and this one: in the layer's inputs, or in its outputs.
        pairs: the number of inputs with a known counterpart.
    """

    def __init__(self, width: int, drift_width: int, device: torch.device) -> None:
        self.hessian: Tensor | None = None
        self.paired = torch.zeros(width, width, device=device)
        self.drift = torch.zeros(drift_width, width, device=device)
        self.pairs = 0
        self._unpaired, self._inputs, self._differences = _Columns(), _Columns(), _Columns()

    def add(self, inputs: Tensor) -> None:
        """Add inputs [..., I]."""
        rows = inputs.flatten(0, -2)
        while len(rows):
            rows = self._unpaired.fill(rows)
            if self._unpaired.full:
                self._sum_unpaired()

    def add_pair(self, inputs: Tensor, difference: Tensor | None) -> None:
        """Add inputs [..., I] and the unquantized model's difference from them, [..., R]; None,
        which then holds for all inputs, is no difference.
        """
        rows = inputs.flatten(0, -2)
        self.pairs += len(rows)
        if difference is None:
            apart = None
        else:
            apart = difference.flatten(0, -2)
        while len(rows):
            rows = self._inputs.fill(rows)
            if apart is None:
                apart = None
            else:
                apart = self._differences.fill(apart)
            if self._inputs.full:
                self._sum_pairs()

    def release(self, group: ProcessGroup) -> tuple[Tensor | None, Tensor, Tensor, int]:
        """Hessian over all inputs, paired, drift and pairs of all processes, which the
        accumulator no longer holds.
        """
        self._sum_unpaired()
        self._sum_pairs()
        self._unpaired = self._inputs = self._differences = _Columns()  # frees their memory
        counts = torch.tensor(
            [int(self.hessian is not None), self.pairs], device=self.paired.device
        )
        group.sum_(counts)
        unpaired, pairs = counts.tolist()
        if unpaired:
            if self.hessian is None:
                self.hessian = self.paired.clone()
            else:
                self.hessian = self.hessian.add_(self.paired)
        for sums in (self.hessian, self.paired) if unpaired else (self.paired,):
            assert sums is not None
            group.sum_(sums)
            fill_lower_(sums)
        group.sum_(self.drift)
        released = self.hessian, self.paired, self.drift, pairs
        del self.hessian, self.paired, self.drift
        return released

    def _sum_unpaired(self) -> None:
        if (x := self._unpaired.take_all()) is not None:
            if self.hessian is None:
                self.hessian = torch.zeros_like(self.paired)
            add_square_(self.hessian, x)

    def _sum_pairs(self) -> None:
        x = self._inputs.take_all()
        difference = self._differences.take_all()
        if x is not None:
            add_square_(self.paired, x)
            if difference is not None:
                self.drift.add_(times(difference, x.t()))


class _Columns:
    """Rows [N, I] that wait, as columns, so that the sums, which are large, are seldom read and
    written.
    """

    def __init__(self) -> None:
        self._columns: Tensor | None = None
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count == ROWS_AT_ONCE

    def fill(self, rows: Tensor) -> Tensor:
        """Keep as many rows as fit, and return the others."""
        if self._columns is None:
            self._columns = rows.new_empty(rows.shape[1], ROWS_AT_ONCE)
        kept = min(len(rows), ROWS_AT_ONCE - self._count)
        self._columns[:, self._count : self._count + kept] = rows[:kept].t()
        self._count += kept
        return rows[kept:]

    def take_all(self) -> Tensor | None:
        """Return all rows as columns [I, N], valid until more are added; None if there are none."""
        count = self._count
        self._count = 0
        if self._columns is None or count == 0:
            return None
        return self._columns[:, :count]
