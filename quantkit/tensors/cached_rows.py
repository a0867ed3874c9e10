"""Rows of a key/value cache: floats, or int8 codes with a scale for each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Without -128, so that codes are symmetric.
_MAX_CODE = 127


class CachedRows(NamedTuple):
    """Keys or values as a cache stores them.

    Attributes:
        rows: [slots, K, S, Dh], floats or int8 codes.
        scales: of the codes of each row, float32 [slots, K, S]; None where rows are floats.
    """

    rows: Tensor
    scales: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """List the existing tensors; positions are the third dimension of each."""
        if self.scales is None:
            return [self.rows]
        return [self.rows, self.scales]

    def up_to(self, length: int) -> CachedRows:
        """Slice the rows of the first positions, as views."""
        return CachedRows(*(tensor[:, :, :length] for tensor in self.tensors()))

    def of_slots(self, slots: Tensor) -> CachedRows:
        """Copy the rows of slots [B]."""
        return CachedRows(*(tensor.index_select(0, slots) for tensor in self.tensors()))

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Convert the rows to floats [slots, K, S, Dh]."""
        if self.scales is None:
            return self.rows.to(dtype)
        return (self.rows.float() * self.scales.unsqueeze(-1)).to(dtype)


def to_cached_rows(floats: Tensor, dtype: torch.dtype) -> CachedRows:
    """Encode floats [B, K, T, Dh] as a cache of a type stores them.

    In int8 a row's scale is its largest absolute value over 127, or NaN where a value is not
    finite.
    """
    if dtype != torch.int8:
        return CachedRows(floats.to(dtype))
    wide = floats.float()
    scales = wide.abs().amax(-1) / _MAX_CODE
    # `where` would copy its number to a GPU.
    divisors = scales.masked_fill((scales > 0).logical_not(), 1)
    codes = (wide / divisors.unsqueeze(-1)).round().to(torch.int8)
    # Codes of a value that is not finite are arbitrary: the scale passes it on to the logits.
    return CachedRows(codes, scales.masked_fill(scales.isfinite().logical_not(), torch.nan))
