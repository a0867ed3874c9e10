"""Writing GGUF: one file, or several of a largest size, tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor
from quantkit.errors import ResumeError
from quantkit.files.gguf_io import ALIGNMENT, build_header, padding
from quantkit.files.gguf_types import GGUF_SUFFIX, GgmlType, GgufTensor, Split, name_part
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import StoredTensor, TensorFile
from quantkit.formats.codecs.codec import Reason, Weight
from quantkit.formats.codecs.ggml import CODED_TYPES, FLOATS, Q8_0, block_type
from quantkit.formats.container import Chunk, tensor_bytes
from quantkit.formats.containers.layout import ShardedEncoder, Unit, assign_file_numbers, plan_units
from quantkit.formats.gguf.names import (
    get_stored_shape,
    gguf_tensors,
    keeps_float32,
)
from quantkit.formats.gguf.stored_form import (
    can_move_columns,
    encode_values,
    rearrange,
    restore,
)
from quantkit.formats.gguf.tensor_reader import read_canonical_tensor, view_of
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import Scales
from quantkit.tensors.spec import TensorSpec

_TYPES = {dtype: kind for kind, dtype in FLOATS.items()}
_LISTED = 24
"""Bytes of a tensor in the header, besides its name and sizes."""
_FILE_TYPES = {
    GgmlType.F32: 0,
    GgmlType.F16: 1,
    GgmlType.Q4_0: 2,
    GgmlType.Q4_1: 3,
    GgmlType.Q8_0: 7,
    GgmlType.Q5_0: 8,
    GgmlType.Q5_1: 9,
    GgmlType.Q2_K: 10,
    GgmlType.Q3_K: 12,
    GgmlType.Q4_K: 15,
    GgmlType.Q5_K: 17,
    GgmlType.Q6_K: 18,
    GgmlType.IQ4_NL: 25,
    GgmlType.IQ4_XS: 30,
    GgmlType.BF16: 32,
    GgmlType.MXFP4: 38,
}
"""``general.file_type`` by the type of most numbers: llama.cpp's `llama_ftype`."""


@dataclass(frozen=True)
class _Written(Unit):
    """A unit as the header lists it; `value` is that of a tensor that the config determines,
    which has no parts.
    """

    stored: GgufTensor
    value: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes + len(padding(self.stored.nbytes))

    @property
    def total_bytes(self) -> int:
        """Return its bytes in the header and in the data."""
        return _LISTED + len(self.stored.name.encode()) + 8 * len(self.stored.shape) + self.nbytes


class GgufEncoder(ShardedEncoder[_Written]):
    """``X.gguf``, or ``X-0000N-of-0000M.gguf`` if a largest size is set. Codes are written as they
    are, as Q4_0, Q8_0 or the type of their blocks; norms, biases and routers in float32, as
    llama.cpp expects them; other floats in their own type.
    """

    rearranges = True

    def __init__(
        self,
        planned: Sequence[TensorSpec],
        config: ModelConfig,
        metadata: Mapping[str, Any],
        extra: Mapping[str, Sequence[float]],
        shard_bytes: int,
        stem: str,
    ) -> None:
        """
        Args:
            planned: canonical tensors, in the order of `gguf_tensors`.
            metadata: of the model; ``general.file_type`` is that of most numbers, unless it is
                stated.
            extra: vectors that the config determines, by name.
            stem: the first part of the names of the files.

        Raises:
            UnsupportedError: if GGUF has no such model, or a tensor cannot be held exactly as it
                is.
        """
        self._config = config
        units = [_extra(name, values) for name, values in extra.items()]
        for tensor, first, spec in plan_units(planned, gguf_tensors(config)):
            # Experts are appended one by one, which buffers less.
            at_once = len(tensor.parts) if tensor.stacked is None else 1
            stored = GgufTensor(tensor.name, _type(tensor, spec), get_stored_shape(config, tensor))
            units.append(_Written(tensor, first, spec, at_once, stored))
        kinds = {"general.file_type": _file_type(units), "general.quantization_version": 2}
        self._metadata: dict[str, Any] = {**kinds, **metadata}
        # Only the first file has the model's metadata, with a large vocabulary.
        split_metadata = Split(0, 1, 0).metadata()
        first_header = build_header(self._metadata | split_metadata, [])
        other_header = build_header(split_metadata, [])
        # The size of a header is rounded up to the alignment.
        sizes = []
        data_sizes = []
        for unit in units:
            sizes.append(unit.total_bytes)
            data_sizes.append(unit.nbytes)
        numbers = assign_file_numbers(
            sizes,
            shard_bytes,
            first_overhead=len(first_header) + ALIGNMENT,
            overhead=len(other_header) + ALIGNMENT,
        )
        super().__init__(planned, units, data_sizes, numbers)
        count = numbers[-1] + 1
        if count == 1:
            self._names = [stem + GGUF_SUFFIX]
        else:
            self._names = [name_part(stem, index, count) for index in range(count)]
        self._headers = [self._header(index, count) for index in range(count)]
        self._headers_hash = sha256(b"".join(self._headers)).hexdigest()

    @property
    def max_buffered_bytes(self) -> int:
        max_bytes = 0
        for unit in self._units:
            if unit.at_once > 1:
                max_bytes = max(max_bytes, unit.stored.nbytes)
        return max_bytes

    def total_bytes(self) -> int:
        total = sum(map(len, self._headers))
        for unit in self._units:
            total += unit.nbytes
        return total

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        # Tensors that the config determines come first.
        if index == 0:
            for number, unit in enumerate(self._units):
                if unit.value is not None:
                    yield from self._iter_chunks(number, 0, unit.value)
        yield from super().encode(index, value)

    def decode(self, index: int, folder: Path) -> Tensor | QuantTensor:
        """Read tensor number `index` back from the files so far."""
        numbers = self._units_of_tensor[index]
        unit = self._units[numbers[0]]
        place = unit.tensor.places[index - unit.first]
        if place.rearranged:
            places = [self._units[number].tensor.places[0] for number in numbers]
            values = [self._read(index, number, folder) for number in numbers]
            value = restore(places, values, unit.spec.dtype)
        else:
            # Others are copies, such as a tied head.
            value = self._read(index, numbers[0], folder)
        if isinstance(value, Tensor):
            return value.to(unit.spec.dtype.torch)
        scheme = self.planned[index].scheme
        assert scheme is not None
        if value.scheme.scales is not Scales.FLOATS:
            return value
        # Blocks of 32 repeat the scale of a longer group.
        repeats = value.scale.shape[1] // scheme.groups(value.shape[1])
        scale = value.scale[:, ::repeats].to(unit.spec.dtype.torch)
        return QuantTensor(value.codes, scale, None, scheme)

    def _read(self, index: int, number: int, folder: Path) -> Weight:
        """Read what unit `number` has of tensor number `index`."""
        unit = self._units[number]
        shard = self._file_of_unit[number]
        # Filters of convolutions have one dimension more than in the file.
        stored = replace(
            unit.stored,
            shape=unit.tensor.shape,
            offset=len(self._headers[shard]) + self._offsets[number],
        )
        return read_canonical_tensor(
            # Without views, which must be within the file: it may be incomplete.
            file=TensorFile(SourceFile(folder / self._names[shard]), {}),
            view=view_of(stored),
            kind=stored.type,
            spec=unit.spec,
            tensor=unit.tensor,
            place=unit.tensor.places[index - unit.first],
            config=self._config,
        )

    def state(self) -> Any:
        return self._headers_hash

    def restore(self, state: Any) -> None:
        """Check that the headers of the files so far are those of this run.

        Raises:
            ResumeError: if they differ.
        """
        if state is not None and state != self.state():
            problem = "the interrupted run had a different tokenizer, chat template or model name"
            raise ResumeError(
                problem, hint="repeat its command, or remove its output and start again"
            )

    def _encode_unit(
        self, unit: _Written, part: int, value: Tensor | QuantTensor
    ) -> Iterator[bytes | memoryview]:
        """Encode a tensor or an expert, with padding after the last part of a tensor."""
        stored = unit.stored
        # A tensor of all experts, [E, O, I] or their biases [E, O], arrives one expert at a time.
        shape = stored.shape if unit.tensor.stacked is None else stored.shape[1:]
        places = unit.tensor.places
        # Tensors that the config determines have none.
        if places and places[part].rearranged:
            value = rearrange(value, places[part])
        if isinstance(value, QuantTensor):
            blocks = CODED_TYPES[stored.type].encode(value)
            if isinstance(blocks, Reason):
                raise blocks.error(unit.tensor.parts[part], stored.type)
            rows = (*shape[:-1], stored.type.row_bytes(shape[-1]))
            yield tensor_bytes(blocks, StoredTensor(stored.name, DType.UINT8, rows))
        else:
            value = encode_values(self._config, unit.tensor, value)
            if stored.type is GgmlType.F32:
                value = value.float()
            if unit.tensor.shape != stored.shape:
                value = value.reshape(shape)
            yield tensor_bytes(value, StoredTensor(stored.name, FLOATS[stored.type], shape))
        if part + unit.at_once >= len(unit.tensor.places):
            yield padding(stored.nbytes)

    def _header(self, index: int, count: int) -> bytes:
        metadata = self._metadata if index == 0 else {}
        if count > 1:
            metadata = metadata | Split(index, count, len(self._units)).metadata()
        tensors = []
        for unit, number in zip(self._units, self._file_of_unit, strict=True):
            if number == index:
                tensors.append(unit.stored)
        return build_header(metadata, tensors)


def _type(tensor: DiskTensor, spec: TensorSpec) -> GgmlType:
    """Choose the type in which a tensor is stored.

    Raises:
        UnsupportedError: if there is no type for its codes.
    """
    if spec.scheme is None:
        if keeps_float32(tensor):
            return GgmlType.F32
        return _TYPES[spec.dtype]
    kind = block_type(spec.scheme)
    reason = kind.explain_unsupported(spec.scheme, spec.shape[-1])
    if reason is None and not can_move_columns(tensor.places[0], kind.scheme):
        reason = Reason(
            f"{tensor.name} has its columns in another order, which cuts blocks of"
            f" {kind.scheme.unit}",
            found=spec.scheme,
            expected=f"{Q8_0.scheme} or a float type",
        )
    if reason is not None:
        raise reason.error(tensor.parts[0], kind.type)
    return kind.type


def _extra(name: str, values: Sequence[float]) -> _Written:
    value = torch.tensor(values, dtype=torch.float32)
    stored = GgufTensor(name, GgmlType.F32, tuple(value.shape))
    spec = TensorSpec(name, stored.shape, DType.FLOAT32)
    return _Written(DiskTensor(name, stored.shape, ()), 0, spec, 1, stored, value)


def _file_type(units: Sequence[_Written]) -> int:
    counts: Counter[GgmlType] = Counter()
    for unit in units:
        counts[unit.stored.type] += math.prod(unit.stored.shape)
    return _FILE_TYPES[max(counts, key=lambda kind: counts[kind])]
