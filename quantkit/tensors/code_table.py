"""Tables of the numbers that codes stand for: those of IQ4_NL and IQ4_XS, and of small floats."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.tensors import float_codes
from quantkit.tensors.scheme import TABLE, Codes


@dataclass(frozen=True)
class CodeTable:
    """The numbers of codes, and where the nearest one changes.

    Attributes:
        values: [N] float32, N at most 256, in rising order; of two zeros the negative one is first.
        bounds: [N - 1] float32: a quotient is rounded to value n if n bounds are below it, so NaN
            is rounded to the last one.
    """

    values: Tensor
    bounds: Tensor

    def find_nearest(self, quotients: Tensor) -> Tensor:
        """Find the indices [...] int32 of the values nearest to float32 quotients [...]."""
        return torch.bucketize(quotients, self.bounds, out_int32=True)

    def round(self, quotients: Tensor) -> Tensor:
        """Round float32 quotients [...] to the nearest values."""
        return self.values[self.find_nearest(quotients)]


@functools.cache
def find_table(kind: Codes, device: torch.device) -> CodeTable | None:
    """Return the table of a kind of codes, on a device; None for integers with equal steps."""
    if kind is Codes.INTEGERS:
        return None
    # A tensor of inference mode could not be used outside of it.
    with torch.inference_mode(mode=False):
        if kind is Codes.TABLE:
            values = torch.tensor(TABLE, dtype=torch.float32)
            # The index of a value is its code, and a tie goes to the smaller one.
            bounds = _compute_middles(values)
        else:
            values, bounds = _list_small_floats(kind)
        return CodeTable(values.to(device), bounds.to(device))


def look_up(codes: Tensor) -> Tensor:
    """Look up the numbers [...] float32 of codes [...] in `TABLE`."""
    # Not `find_table`: compilers trace this function, and cannot trace a cache.
    table = torch.tensor(TABLE, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def find_nearest(quotients: Tensor) -> Tensor:
    """Find the codes [...] uint8 of the numbers of `TABLE` nearest to float32 quotients [...]."""
    table = find_table(Codes.TABLE, quotients.device)
    assert table is not None
    return table.find_nearest(quotients).to(torch.uint8)


def _compute_middles(values: Tensor) -> Tensor:
    return (values[1:] + values[:-1]) / 2


def _list_small_floats(kind: Codes) -> tuple[Tensor, Tensor]:
    """List the values of small floats, and the bounds between them: ties go to even codes, as by
    `float_codes.round_to_code_values`.
    """
    codes = torch.arange(1 << float_codes.MAGNITUDE_BITS[kind], dtype=torch.uint8)
    magnitudes = float_codes.decode_values(codes, kind)
    # The last code of e4m3 is NaN.
    magnitudes = magnitudes[magnitudes.isfinite()]
    is_even = torch.arange(len(magnitudes)) % 2 == 0
    values = torch.cat([-magnitudes.flip(0), magnitudes])
    middles = _compute_middles(values)
    # Just below the middle, the middle itself is rounded up. Of the two zeros, both even, the
    # negative one is thus for numbers below zero.
    lower = torch.nextafter(middles, torch.tensor(-torch.inf))
    upper_is_even = torch.cat([is_even.flip(0), is_even])[1:]
    return values, torch.where(upper_is_even, lower, middles)
