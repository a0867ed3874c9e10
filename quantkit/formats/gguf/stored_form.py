"""The values of a GGUF file's tensors and those of canonical ones: what is added to norms, decay
rates instead of their logarithms, and rows and columns in other orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, Place
from quantkit.architectures.families.family import Ranges
from quantkit.errors import CheckpointError
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.gguf.names import get_norm_offset, stores_decay_rates
from quantkit.tensors.dtypes import DType
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.scheme import QuantScheme, Scales
from quantkit.tensors.tensor_slice import TensorSlice

# Two roundings of a rate to float32, by the file's writer and here.
_RATE_ERROR = 2.0**-22


def encode_values(config: ModelConfig, tensor: DiskTensor, value: torch.Tensor) -> torch.Tensor:
    """Compute the values that a file stores of canonical ones, both of the same shape; of norms
    with an offset and of decay rates in float32.
    """
    offset = get_norm_offset(config, tensor)
    if offset:
        return value.float() + offset
    if stores_decay_rates(tensor):
        # In float64, so that only the result is rounded.
        return -value.double().exp().float()
    return value


def decode_values(
    config: ModelConfig, tensor: DiskTensor, stored: torch.Tensor, path: object
) -> torch.Tensor:
    """Compute canonical values from those that a file stores, in the stored dtype. Raises
    `CheckpointError` for a rate with which states would grow.
    """
    offset = get_norm_offset(config, tensor)
    if offset:
        # In float32, so that the difference is rounded once.
        return (stored.float() - offset).to(stored.dtype)
    if stores_decay_rates(tensor):
        # NaN fails the comparison.
        if not (stored <= 0).all():
            raise CheckpointError(
                f"tensor '{tensor.name}' has a rate of decay above 0", path=str(path)
            )
        return _compute_logarithms(-stored.double()).to(stored.dtype)
    return stored


def _compute_logarithms(rates: torch.Tensor) -> torch.Tensor:
    """Compute the logarithms of rates that were rounded to float32. Published models have
    logarithms of 16 bits: if rounding to these explains all rates, they are the original ones.
    """
    logarithms = rates.log()
    for dtype in (torch.bfloat16, torch.float16):
        rounded = logarithms.to(dtype).double()
        if ((rounded.exp() - rates).abs() <= _RATE_ERROR * rates).all():
            return rounded
    return logarithms


def rearrange(value: Weight, place: Place) -> Weight:
    """Take the rows and columns of a canonical tensor [O, ...] that a file's tensor has, in its
    order. Raises `RequestError` if codes cannot be moved, see `can_move_columns`.
    """
    if place.row_ranges is not None:
        value = TensorSlice(0, place.row_ranges).of_weight(value)
    return rearrange_columns(value, place)


def restore(places: Sequence[Place], values: Sequence[Weight], dtype: DType) -> Weight:
    """Join the tensors of a file that store a canonical one, and put rows and columns in canonical
    order: the opposite of `rearrange`.

    Args:
        values: of each of `places`, all of one scheme, or all floats.
        dtype: of the result if it is floats.
    """
    row_ranges: list[tuple[int, int]] = []
    restored: list[Weight] = []
    for place, value in zip(places, values, strict=True):
        if place.row_ranges is not None:
            row_ranges += place.row_ranges
        value = restore_columns(value, place)
        if isinstance(value, torch.Tensor):
            value = value.to(dtype.torch)
        restored.append(value)
    if not row_ranges:
        return restored[0]
    return TensorSlice(0, _invert(row_ranges)).of_weight(_concatenate(restored))


def rearrange_columns(value: Weight, place: Place) -> Weight:
    """Put the columns of rows [N, I] in the order of a file's tensor."""
    if place.column_ranges is None:
        return value
    return _take_columns(value, place.column_ranges)


def restore_columns(value: Weight, place: Place) -> Weight:
    """Put the columns of rows [N, I] of a file's tensor in canonical order."""
    if place.column_ranges is None:
        return value
    return _take_columns(value, _invert(place.column_ranges))


def can_move_columns(place: Place, scheme: QuantScheme) -> bool:
    """Return whether the columns of codes [O, I] can be moved as a place says: in complete groups
    of the scheme, or blocks of groups.
    """
    for start, stop in place.column_ranges or ():
        if start % scheme.unit or stop % scheme.unit:
            return False
    return True


def _concatenate(values: Sequence[Weight]) -> Weight:
    quantized = [value for value in values if isinstance(value, qtensor.QuantTensor)]
    if quantized:
        return qtensor.concatenate_rows(quantized)
    return torch.cat([value for value in values if isinstance(value, torch.Tensor)])


def _take_columns(value: Weight, ranges: Ranges) -> Weight:
    columns = TensorSlice(1, ranges)
    if not isinstance(value, qtensor.QuantTensor):
        return columns.of(value)
    count = value.shape[1]
    value = _split_groups(value, ranges)

    def take(entries: torch.Tensor) -> torch.Tensor:
        # Codes have an entry for each column, scales one for each group or block.
        size = count // entries.shape[1]
        if size == count:
            return entries
        groups = tuple((start // size, stop // size) for start, stop in ranges)
        return TensorSlice(1, groups).of(entries)

    return value.map(take)


def _split_groups(value: qtensor.QuantTensor, ranges: Ranges) -> qtensor.QuantTensor:
    """Repeat scales of groups that the ranges cut, for smaller groups that they do not."""
    group = value.scheme.group_size
    if group is None or value.scheme.scales is not Scales.FLOATS:
        return value
    size = math.gcd(group, *(edge for edges in ranges for edge in edges))
    if size == group:
        return value
    zero = value.zero
    if zero is not None:
        zero = zero.repeat_interleave(group // size, 1)
    scale = value.scale.repeat_interleave(group // size, 1)
    scheme = replace(value.scheme, group_size=size)
    return qtensor.QuantTensor(value.codes, scale, zero, scheme, outer=value.outer)


def _invert(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """List where each range is after all are put one after the other, in the order of their first
    numbers.
    """
    located: list[tuple[int, int, int]] = []
    offset = 0
    for start, stop in ranges:
        located.append((start, offset, offset + stop - start))
        offset += stop - start
    return tuple((low, high) for _, low, high in sorted(located))
