"""Groups with an offset in floats, as in some formats: ``w = scale * (code - origin) + offset``. If every offset is an
integer multiple of its scale, they are codes with zero points; otherwise they are read as floats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quantkit.formats.codecs.codec import RawModule
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.tensors.dtypes import DType

_CHUNK = 1 << 17  # scales at a time


def zero_points(scale: Tensor, offset: Tensor, bits: int, origin: int = 0) -> Tensor | None:
    """The zero points, uint8 in the shape of the scales; None if a group has none.

    A group whose scale and offset are zero gets the middle code.

    Args:
        scale, offset: of each group, in one float type.
        origin: the code whose weight is the offset.
    """
    import torch

    steps, offset = scale.double(), offset.double()
    zero = torch.where(steps == 0, 1 << (bits - 1), origin - (offset / steps).round())
    whole = (zero >= 0) & (zero < 1 << bits) & (steps * (origin - zero) == offset) & steps.isfinite()
    whole |= (steps == 0) & (offset == 0)
    return zero.to(torch.uint8) if bool(whole.all()) else None


def scheme_of(
    raw: RawModule, scales: str, offsets: str, bits: int, group_size: int, origin: int = 0
) -> QuantScheme | None:  # fmt: skip
    """The scheme of codes with such groups; None if some offset is not an integer multiple of its scale.

    Codes of 8 bits with equal groups in each row are int8 per row, which such formats store in groups.

    Args:
        scales, offsets: the suffixes of tensors [..., G].
        bits, origin: see `zero_points`.
    """
    from quantkit.tensors.qtensor import row_chunks

    stored = raw.find(scales)
    assert stored is not None, "its shape was checked"
    symmetric, by_row = True, bits == 8
    for rows in row_chunks(stored.shape[0], math.prod(stored.shape[1:]), _CHUNK):
        scale, offset = (raw.read(suffix, TensorSlice(0, (rows,))) for suffix in (scales, offsets))
        zero = zero_points(scale, offset, bits, origin)
        if zero is None:
            return None
        symmetric = symmetric and bool((zero == 1 << (bits - 1)).all())
        by_row = by_row and all(bool((one == one[..., :1]).all()) for one in (scale, zero))
    return QuantScheme(bits, None if by_row else group_size, symmetric)


def affine(codes: Tensor, scale: Tensor, offset: Tensor, dtype: DType, origin: int = 0) -> Tensor:
    """The weights [R, C] of such groups, in float32 and then rounded once.

    Args:
        codes: [R, C] uint8.
        scale, offset: [R, G].
        dtype: of the weights.
        origin: see `zero_points`.
    """
    from quantkit.tensors.qtensor import row_chunks

    out = dtype.empty(codes.shape)
    for start, stop in row_chunks(*codes.shape):
        steps, base = (groups[start:stop].float().unsqueeze(-1) for groups in (scale, offset))
        values = codes[start:stop].reshape(stop - start, scale.shape[1], -1).float().sub_(origin)
        out[start:stop] = values.mul_(steps).add_(base).flatten(1)
    return out
