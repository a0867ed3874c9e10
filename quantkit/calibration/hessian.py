"""Sums over a layer's inputs, for the solver."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.distributed.group import ProcessGroup
from quantkit.tensors.products import add_square_, fill_lower_, times

ROWS_AT_ONCE = 2048


class HessianAccumulator:
    """Sums over the inputs X [N, I] of a layer for N tokens.

    Attributes:
        unpaired: [I, I] float32, ``X.T @ X`` over the tokens whose counterparts in the unquantized
            model are not known; None if all counterparts are known.
        paired: the same over the tokens whose counterparts are known.
        drift: [R, I] float32, ``D.T @ X`` over these, where D [N, R] is the difference between the
            unquantized model and this one: in the layer's inputs, or in its outputs.
        paired_tokens: the number of tokens with a known counterpart.
    """

    def __init__(self, width: int, drift_width: int, device: torch.device) -> None:
        self.unpaired: Tensor | None = None
        self.paired = torch.zeros(width, width, device=device)
        self.drift = torch.zeros(drift_width, width, device=device)
        self.paired_tokens = 0
        self._unpaired_rows = _Columns()
        self._paired_rows = _Columns()
        self._differences = _Columns()

    def add(self, inputs: Tensor) -> None:
        """Add the inputs [..., I] of tokens."""
        rows = inputs.flatten(0, -2)
        while len(rows):
            rows = self._unpaired_rows.fill(rows)
            if self._unpaired_rows.full:
                self._sum_unpaired()

    def add_pair(self, inputs: Tensor, difference: Tensor | None) -> None:
        """Add the inputs [..., I] of tokens and the unquantized model's difference from them,
        [..., R]; None, which then holds for all tokens, is no difference.
        """
        rows = inputs.flatten(0, -2)
        self.paired_tokens += len(rows)
        waiting_differences: Tensor | None = None
        if difference is not None:
            waiting_differences = difference.flatten(0, -2)
        while len(rows):
            rows = self._paired_rows.fill(rows)
            if waiting_differences is not None:
                waiting_differences = self._differences.fill(waiting_differences)
            if self._paired_rows.full:
                self._sum_pairs()

    def release(self, group: ProcessGroup) -> tuple[Tensor | None, Tensor, Tensor, int]:
        """Sum over all processes, and let go of the sums.

        Returns:
            The Hessian over all tokens, None if all of them are paired, as it then equals
            `paired`; `paired`; `drift`; and `paired_tokens`.
        """
        self._sum_unpaired()
        self._sum_pairs()
        # Frees the memory of rows that waited.
        self._unpaired_rows = self._paired_rows = self._differences = _Columns()
        counts = torch.tensor(
            [int(self.unpaired is not None), self.paired_tokens], device=self.paired.device
        )
        group.sum_(counts)
        unpaired_processes, paired_tokens = counts.tolist()
        sums = [self.paired]
        if unpaired_processes:
            if self.unpaired is None:
                self.unpaired = self.paired.clone()
            else:
                self.unpaired = self.unpaired.add_(self.paired)
            sums = [self.unpaired, self.paired]
        for products in sums:
            group.sum_(products)
            fill_lower_(products)
        # The local name would keep them in memory.
        del sums, products
        group.sum_(self.drift)
        released = self.unpaired, self.paired, self.drift, paired_tokens
        del self.unpaired, self.paired, self.drift
        return released

    def _sum_unpaired(self) -> None:
        if (x := self._unpaired_rows.take_all()) is not None:
            if self.unpaired is None:
                self.unpaired = torch.zeros_like(self.paired)
            add_square_(self.unpaired, x)

    def _sum_pairs(self) -> None:
        x = self._paired_rows.take_all()
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
