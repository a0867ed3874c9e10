"""Canonical tensors from those on disk, and back: rows of fused projections, of stacked experts,
and rotary rows in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from quantkit.architectures.disk import DiskTensor, Place
from quantkit.files.tensor_file import TensorFile, View
from quantkit.formats.codecs.codec import RawModule, Weight
from quantkit.tensors.late import qtensor, torch
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice


def read_floats(
    file: TensorFile, view: View, tensor: DiskTensor, place: Place, part: TensorSlice | None
) -> torch.Tensor:
    """Return a canonical tensor, or a part of it, from one that is stored as floats at a view; no
    other rows are read.
    """
    if tensor.whole:
        return file.read_view(view, part)
    if place.expert is not None:
        view = view.at(place.expert)
        assert tensor.stacked is not None
        if tensor.stacked.transposed:
            view = view.transpose()
    view = view.every(place.first, place.step, place.shape[0])
    if place.head_order is None:
        return file.read_view(view, part)
    wanted, inside = _whole_heads(part, len(place.head_order))
    rows = _in_order(file.read_view(view, wanted), place.head_order)
    if inside is None:
        return rows
    return inside.of(rows)


class Decodes(Protocol):
    """Decodes a weight: a codec, or an adapter of a file that computes floats."""

    def decode(self, raw: Any, spec: TensorSpec, part: TensorSlice | None = None) -> Weight: ...


def decode(
    codec: Decodes,
    raw: RawModule | None,
    spec: TensorSpec,
    tensor: DiskTensor,
    place: Place,
    part: TensorSlice | None,
) -> Weight:
    """Return a canonical tensor, or a part of it, from one that a codec decodes, which has this
    spec on disk; of a stacked one only the expert is decoded, floats [1, O, I], or [1, I, O] if
    they are transposed, or codes [O, I].
    """
    if place.expert is not None:
        slab = codec.decode(raw, spec, TensorSlice(0, ((place.expert, place.expert + 1),)))
        if isinstance(slab, qtensor.QuantTensor):
            own = TensorSlice(0, ((place.first, place.first + place.shape[0]),)).of_weight(slab)
            if part is None:
                return own
            return part.of_weight(own)
        if tensor.stacked is not None and tensor.stacked.transposed:
            matrix = slab[0].t()
        else:
            matrix = slab[0]
        floats = matrix[place.first :: place.step][: place.shape[0]]
        if part is None:
            return floats.contiguous()
        return part.of(floats).contiguous()
    wanted = part
    inside = None
    if place.head_order is not None:
        wanted, inside = _whole_heads(part, len(place.head_order))
    if place.shape[0] == spec.shape[0]:
        value = codec.decode(raw, spec, wanted)
    elif wanted is not None and wanted.axis == 1:
        rows = TensorSlice(0, ((place.first, place.first + place.shape[0]),))
        value = rows.of_weight(codec.decode(raw, spec, wanted))
    else:
        ranges = ((0, place.shape[0]),) if wanted is None else wanted.ranges
        shifted = tuple((place.first + start, place.first + stop) for start, stop in ranges)
        value = codec.decode(raw, spec, TensorSlice(0, shifted))
    if place.head_order is not None:
        value = reorder_rows(value, place.head_order)
    if inside is None:
        return value
    return inside.of_weight(value)


def assemble_tensor(tensor: DiskTensor, values: Sequence[Weight]) -> Weight:
    """Return a tensor on disk, or one expert of it, from its parts in order.

    Raises:
        ValueError: if the parts differ in scheme or float type.
    """
    places = tensor.places[: len(values)]
    parts = []
    for place, value in zip(places, values, strict=True):
        order = place.head_order
        parts.append(
            value
            if order is None
            else reorder_rows(value, sorted(range(len(order)), key=order.__getitem__))
        )
    if len(parts) == 1 and tensor.stacked is None:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, qtensor.QuantTensor)]
    floats = [part for part in parts if not isinstance(part, qtensor.QuantTensor)]
    if quantized:
        if floats or (joined := qtensor.concatenate_if_uniform(quantized)) is None:
            raise ValueError(f"{tensor.name}: its parts are quantized differently")
        return joined
    if tensor.stacked is not None and tensor.stacked.interleaved and len(floats) > 1:
        rows = torch.stack(floats, 1).flatten(0, 1)
    else:
        if len(floats) > 1:
            rows = torch.cat(floats)
        else:
            rows = floats[0]
    turned = tensor.stacked is not None and tensor.stacked.transposed
    return rows.t() if turned else rows


def share(size: int, tensor: DiskTensor, place: Place) -> int:
    """Return the bytes of a part of a tensor; the shares of all parts add up to its size."""
    elements = math.prod(tensor.shape)
    if place is tensor.places[0]:
        return size - sum(size * math.prod(other.shape) // elements for other in tensor.places[1:])
    return size * math.prod(place.shape) // elements


def reorder_rows(value: Weight, order: Sequence[int]) -> Weight:
    """Rows in another order within each head."""
    if not isinstance(value, qtensor.QuantTensor):
        return _in_order(value, order)
    return value.map(lambda rows: _in_order(rows, order))


def _in_order(rows: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    heads = rows.reshape(-1, len(order), *rows.shape[1:])
    return heads[:, list(order)].reshape(rows.shape)


def _whole_heads(
    part: TensorSlice | None, head: int
) -> tuple[TensorSlice | None, TensorSlice | None]:
    """Return the complete heads that contain a part of rows, and the part of these; None for all
    rows.
    """
    if (
        part is None
        or part.axis == 1
        or not any(bound % head for bounds in part.ranges for bound in bounds)
    ):
        return part, None
    wider = []
    inside = []
    before = 0
    for start, stop in part.ranges:
        low = start // head * head
        high = -(-stop // head) * head
        wider.append((low, high))
        inside.append((before + start - low, before + stop - low))
        before += high - low
    return TensorSlice(0, tuple(wider)), TensorSlice(0, tuple(inside))
