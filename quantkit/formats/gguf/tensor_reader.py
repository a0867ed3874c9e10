"""Read canonical tensors from the tensors of a GGUF file."""

from __future__ import annotations

from dataclasses import replace

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, Place
from quantkit.files.gguf_types import GgmlType, GgufTensor
from quantkit.files.tensor_file import TensorFile, View, contiguous_strides
from quantkit.formats.codecs.codec import Weight
from quantkit.formats.codecs.ggml import FLOATS, GgmlRows
from quantkit.formats.containers.hf_parts import decode_place, read_floats
from quantkit.formats.gguf.stored_form import decode_values
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
    config: ModelConfig,
    part: TensorSlice | None = None,
) -> Weight:
    """Read the canonical tensor at `place` of a GGUF tensor, or a part of it; one that is
    rearranged in the order of the file.

    Args:
        view: where the data of the GGUF tensor is in `file`, see `view_of`.
        kind, spec: how the GGUF tensor is stored, and as what it is read.

    Raises:
        CheckpointError: see `decode_values`.
    """
    if place.rearranged:
        place = Place(place.name, tensor.shape)
    if kind in FLOATS:
        floats = read_floats(file, view, tensor, place, part)
        return decode_values(config, tensor, floats, file.path)
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
