"""Some rows or columns of a weight."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.tensors.late import qtensor, torch


@dataclass(frozen=True)
class TensorSlice:
    """Ranges along one axis of a tensor, one after the other; of rows (axis 0), a range may come
    twice.

    Attributes:
        axis: 0, or 1 with a single range.
        ranges: first index and the one after the last, none of them empty.
    """

    axis: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Along its axis."""
        return sum(stop - start for start, stop in self.ranges)

    def rows(self, start: int, stop: int) -> TensorSlice:
        """Some of the rows that this part of rows has, counted from its first."""
        found = []
        before = 0
        for first, last in self.ranges:
            low = max(first, first + start - before)
            high = min(last, first + stop - before)
            if low < high:
                found.append((low, high))
            before += last - first
        return TensorSlice(0, tuple(found))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """That part of a tensor; a view where it is one range."""
        pieces = []
        for start, stop in self.ranges:
            pieces.append(tensor.narrow(self.axis, start, stop - start))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, self.axis)

    def of_weight(
        self, value: torch.Tensor | qtensor.QuantTensor
    ) -> torch.Tensor | qtensor.QuantTensor:
        """That part of a weight, quantized or not.

        Raises:
            RequestError: see `QuantTensor.columns`.
        """
        if not isinstance(value, qtensor.QuantTensor):
            return self.of(value)
        if self.axis == 1:
            return value.columns(*self.ranges[0])
        return value.map(self.of)
