"""Canonical tensors from those on disk, and back: rows of fused projections, of stacked experts,
transposed weights, and rotary rows in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from quantkit.architectures.disk import DiskTensor, Place
from quantkit.files.tensor_file import TensorFile, View
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice


def read_floats(
    file: TensorFile, view: View, tensor: DiskTensor, place: Place, part: TensorSlice | None
) -> torch.Tensor:
    """Read a canonical tensor, or a part of it, from one that is stored as floats at a view; no
    other rows are read.
    """
    if tensor.whole:
        return file.read_view(view, part)
    if place.expert is not None:
        view = view.at(place.expert)
        assert tensor.stacked is not None
        if tensor.stacked.transposed:
            view = view.transpose()
    if place.transposed:
        view = view.narrow(0, place.first, place.shape[1]).transpose()
    else:
        # A step of two selects the gate or up rows of experts that are interleaved.
        view = view.every(place.first, place.step, place.shape[0])
    if place.head_order is None:
        return file.read_view(view, part)
    # Rows can be put in order only within complete heads.
    heads, inside = _whole_heads(part, len(place.head_order))
    rows = _in_order(file.read_view(view, heads), place.head_order)
    if inside is None:
        return rows
    return inside.of(rows)


class Decodes(Protocol):
    """Decodes a weight: a codec, or an adapter of a file that computes floats."""

    def decode(self, raw: Any, spec: TensorSpec, part: TensorSlice | None = None) -> Weight: ...


def decode_place(
    codec: Decodes,
    raw: RawModule | None,
    spec: TensorSpec,
    tensor: DiskTensor,
    place: Place,
    part: TensorSlice | None,
) -> Weight:
    """Decode the canonical tensor [O, I] at `place` of a tensor that has this spec on disk, or a
    part of it.

    Of stacked experts only one is decoded. The codec returns its floats as [1, O, I], or [1, I, O]
    if they are transposed, or its codes as [O, I].
    """
    place_rows = TensorSlice(0, ((place.first, place.first + place.shape[0]),))
    if place.expert is not None:
        slab = codec.decode(raw, spec, TensorSlice(0, ((place.expert, place.expert + 1),)))
        if isinstance(slab, qtensor.QuantTensor):
            expert_codes: Weight
            if place.step == 1:
                expert_codes = place_rows.of_weight(slab)
            else:
                # A step of two selects the gate or up rows of experts that are interleaved.
                stop = place.first + place.step * place.shape[0]
                expert_codes = slab.take(torch.arange(place.first, stop, place.step))
            if part is None:
                return expert_codes
            return part.of_weight(expert_codes)
        if tensor.stacked is not None and tensor.stacked.transposed:
            matrix = slab[0].t()
        else:
            matrix = slab[0]
        floats = matrix[place.first :: place.step][: place.shape[0]]
        # Contiguous, so that the result does not keep the memory of the complete expert.
        if part is None:
            return floats.contiguous()
        return part.of(floats).contiguous()
    if place.transposed:
        # Codes are stored with outputs first, so these are floats.
        rows = TensorSlice(0, ((place.first, place.first + place.shape[1]),))
        stored = codec.decode(raw, spec, rows)
        assert isinstance(stored, torch.Tensor)
        matrix = stored.t()
        return (matrix if part is None else part.of(matrix)).contiguous()
    # Rows can be put in order only within complete heads.
    requested = part
    inside = None
    if place.head_order is not None:
        requested, inside = _whole_heads(part, len(place.head_order))
    if place.shape[0] == spec.shape[0]:
        value = codec.decode(raw, spec, requested)
    elif requested is not None and requested.axis == 1:
        # A codec decodes a part of rows or of columns, not of both.
        value = place_rows.of_weight(codec.decode(raw, spec, requested))
    else:
        ranges = ((0, place.shape[0]),) if requested is None else requested.ranges
        shifted = tuple((place.first + start, place.first + stop) for start, stop in ranges)
        value = codec.decode(raw, spec, TensorSlice(0, shifted))
    if place.head_order is not None:
        value = reorder_rows(value, place.head_order)
    if inside is None:
        return value
    return inside.of_weight(value)


def assemble_tensor(tensor: DiskTensor, values: Sequence[Weight]) -> Weight:
    """Assemble a tensor on disk, or one expert of it, from its parts in order.

    Raises:
        ValueError: if the parts differ in scheme or float type.
    """
    places = tensor.places[: len(values)]
    parts: list[Weight] = []
    for place, value in zip(places, values, strict=True):
        head_order = place.head_order
        if place.transposed:
            assert isinstance(value, torch.Tensor)
            parts.append(value.t())
        elif head_order is None:
            parts.append(value)
        else:
            # The order in which the file is read, inverted.
            inverse_order = sorted(range(len(head_order)), key=head_order.__getitem__)
            parts.append(reorder_rows(value, inverse_order))
    if len(parts) == 1 and tensor.stacked is None:
        return parts[0]
    quantized: list[qtensor.QuantTensor] = []
    floats: list[torch.Tensor] = []
    for part in parts:
        if isinstance(part, qtensor.QuantTensor):
            quantized.append(part)
        else:
            floats.append(part)
    if quantized:
        joined = None if floats else qtensor.concatenate_if_uniform(quantized)
        if joined is None:
            raise ValueError(f"{tensor.name}: its parts are quantized differently")
        return joined
    stacked = tensor.stacked
    if len(floats) == 1:
        rows = floats[0]
    elif stacked is not None and stacked.interleaved:
        # Rows of gate and up alternate.
        rows = torch.stack(floats, 1).flatten(0, 1)
    else:
        rows = torch.cat(floats)
    is_transposed = stacked is not None and stacked.transposed
    return rows.t() if is_transposed else rows


def share(size: int, tensor: DiskTensor, place: Place) -> int:
    """Compute the bytes of a part of a tensor; the shares of all parts add up to its size."""
    elements = math.prod(tensor.shape)
    # Integer division rounds down; the first part gets the remainder.
    if place is tensor.places[0]:
        first_size = size
        for other_place in tensor.places[1:]:
            first_size -= size * math.prod(other_place.shape) // elements
        return first_size
    return size * math.prod(place.shape) // elements


def reorder_rows(value: Weight, order: Sequence[int]) -> Weight:
    """Put rows in another order within each head."""
    if not isinstance(value, qtensor.QuantTensor):
        return _in_order(value, order)
    return value.map(lambda rows: _in_order(rows, order))


def _in_order(rows: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    heads = rows.reshape(-1, len(order), *rows.shape[1:])
    return heads[:, list(order)].reshape(rows.shape)


def _whole_heads(
    part: TensorSlice | None, head: int
) -> tuple[TensorSlice | None, TensorSlice | None]:
    """Extend a part of rows to the complete heads that contain it, and locate the part within
    these; None for all rows.
    """
    if part is None or part.axis == 1:
        return part, None
    heads = []
    inside = []
    rows_before = 0
    for start, stop in part.ranges:
        low = start // head * head
        high = -(-stop // head) * head
        heads.append((low, high))
        inside.append((rows_before + start - low, rows_before + stop - low))
        rows_before += high - low
    # A part of complete heads needs no second slice, which would copy it.
    if tuple(heads) == tuple(part.ranges):
        return part, None
    return TensorSlice(0, tuple(heads)), TensorSlice(0, tuple(inside))
