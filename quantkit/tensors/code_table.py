"""Codes that stand for the numbers of a fixed table, of IQ4_NL and IQ4_XS."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.tensors.scheme import TABLE


def look_up(codes: Tensor) -> Tensor:
    """Look up the numbers of codes [...], as float32."""
    return _table(codes.device)[codes.int()]


def find_nearest(quotients: Tensor) -> Tensor:
    """Find the codes [...] uint8 of the numbers that are nearest to float32 quotients [...]."""
    table = _table(quotients.device)
    # Where the nearest number of the table changes.
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(quotients, middles, out_int32=True).to(torch.uint8)


def round_to_table(quotients: Tensor) -> Tensor:
    """Round float32 quotients [...] to the nearest numbers of the table."""
    return look_up(find_nearest(quotients))


def _table(device: torch.device) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.float32, device=device)
