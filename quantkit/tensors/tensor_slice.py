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
        """Count the indices along its axis."""
        return sum(stop - start for start, stop in self.ranges)

    def rows(self, start: int, stop: int) -> TensorSlice:
        """Select some of the rows of this part, counted from its first."""
        ranges = []
        rows_before = 0
        for first, last in self.ranges:
            low = max(first, first + start - rows_before)
            high = min(last, first + stop - rows_before)
            if low < high:
                ranges.append((low, high))
            rows_before += last - first
        return TensorSlice(0, tuple(ranges))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cut that part out of a tensor; a view where it is one range."""
        pieces = []
        for start, stop in self.ranges:
            pieces.append(tensor.narrow(self.axis, start, stop - start))
        # `torch.cat` would copy even a single piece.
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, self.axis)

    def of_weight(
        self, value: torch.Tensor | qtensor.QuantTensor
    ) -> torch.Tensor | qtensor.QuantTensor:
        """Cut that part out of a weight, quantized or not.

        Raises:
            RequestError: see `QuantTensor.columns`.
        """
        if not isinstance(value, qtensor.QuantTensor):
            return self.of(value)
        if self.axis == 1:
            return value.columns(*self.ranges[0])
        return value.map(self.of)
