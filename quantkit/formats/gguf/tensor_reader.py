"""Read canonical tensors from the tensors of a GGUF file."""

from __future__ import annotations

from dataclasses import replace

from quantkit.architectures.disk import DiskTensor, Place
from quantkit.files.gguf_types import GgmlType, GgufTensor
from quantkit.files.tensor_file import TensorFile, View, contiguous_strides
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.codecs.ggml import FLOATS, GgmlRows
from quantkit.formats.containers.hf_parts import decode_place, read_floats
from quantkit.tensors.dtypes import DType
from quantkit.tensors.spec import TensorSpec
from quantkit.tensors.tensor_slice import TensorSlice


def read_canonical_tensor(
    file: TensorFile,
    view: View,
    kind: GgmlType,
    spec: TensorSpec,
    tensor: DiskTensor,
    place: Place,
    norm_offset: float,
    part: TensorSlice | None = None,
) -> Weight:
    """Read the canonical tensor at `place` of a GGUF tensor, or a part of it.

    Args:
        view: where the data of the GGUF tensor is in `file`, see `view_of`.
        kind, spec: how the GGUF tensor is stored, and as what it is read.
        norm_offset: see `get_norm_offset`.
    """
    if kind in FLOATS:
        floats = read_floats(file, view, tensor, place, part)
        # In float32, so that the difference is rounded once.
        if norm_offset:
            return (floats.float() - norm_offset).to(floats.dtype)
        return floats
    rows = GgmlRows(
        file=file, view=view, type=kind, coded=spec.scheme is not None, dtype=spec.dtype
    )
    if place.expert is None:
        return decode_place(rows, None, spec, tensor, place, part)
    expert_spec = replace(spec, shape=spec.shape[1:])
    expert_rows = rows.of_expert(place.expert)
    return decode_place(expert_rows, None, expert_spec, tensor, replace(place, expert=None), part)


def view_of(tensor: GgufTensor) -> View:
    """Locate a tensor in its file: floats by elements, all others by bytes."""
    dtype = FLOATS.get(tensor.type)
    shape = tensor.shape
    if dtype is None:
        dtype = DType.UINT8
        shape = (*shape[:-1], tensor.type.row_bytes(shape[-1]))
    return View(dtype, tensor.offset, shape, contiguous_strides(shape))
