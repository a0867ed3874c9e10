"""Writing Hugging Face's weights: safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, disk_tensors
from quantkit.architectures.names import is_embedding
from quantkit.files.safetensors_io import build_header
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import StoredTensor, TensorFile, View, contiguous_strides
from quantkit.formats.codecs.codec import Codec, QuantMethod, RawModule, Reason
from quantkit.formats.container import Chunk, Encoder, tensor_bytes
from quantkit.formats.containers.hf_parts import assembled, decode, read_floats
from quantkit.formats.containers.layout import file_numbers, offsets, units_of
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec


@dataclass(frozen=True)
class _Written:
    """A tensor on disk, or the several of a quantized module.

    Attributes:
        first: the index of its first part among the planned tensors.
        spec: its name on disk, shape, float type and scheme.
        codec: of a quantized module; None for floats.
        at_once: how many parts are appended together: all, or those of one expert.
    """

    tensor: DiskTensor
    first: int
    spec: TensorSpec
    codec: Codec | None
    stored: Sequence[StoredTensor]
    at_once: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored)


class SafetensorsEncoder(Encoder):
    """Hugging Face shards ``model-0000N-of-0000M.safetensors``, or one ``model.safetensors``, with the tensors that a
    family has on disk. The parts of one follow each other in the plan, and are held until all are put."""

    def __init__(
        self, planned: Sequence[TensorSpec], config: ModelConfig, shard_bytes: int, method: QuantMethod,
        extra_tensors: Sequence[tuple[StoredTensor, bytes]] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            planned: canonical tensors, in the order of `disk_tensors`.
            method: of the quantized modules.
            extra_tensors: small tensors besides the model's, with their bytes, at the end of the last file.

        Raises:
            UnsupportedError: if it has no codec for a scheme, or the parts of a tensor differ in scheme or float type.
        """
        self.planned = planned
        self._method = method.name
        self._extra_tensors = extra_tensors
        self._tensors = _written(planned, config, method)
        self._number_of = [number for number, one in enumerate(self._tensors) for _ in one.tensor.places]
        self._held: list[Tensor | QuantTensor] = []
        sizes = [one.nbytes for one in self._tensors]
        self._shard_of = file_numbers(sizes, shard_bytes)
        self._offsets = offsets(sizes, self._shard_of)
        self._data_bytes = sum(sizes) + sum(len(data) for _, data in extra_tensors)
        count = self._shard_of[-1] + 1
        self._names = [
            "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
        ]

    @property
    def rearranges(self) -> bool:
        return not all(one.tensor.whole for one in self._tensors)

    @property
    def joined_bytes(self) -> int:
        parts = (
            self.planned[one.first : one.first + one.at_once] for one in self._tensors if len(one.tensor.places) > 1
        )
        return max((sum(math.prod(p.shape) * p.dtype.itemsize for p in specs) for specs in parts), default=0)

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def total_bytes(self) -> int:
        return self._data_bytes + sum(map(len, self._headers))

    def files(self) -> Sequence[str]:
        return self._names

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        number = self._number_of[index]
        shard, unit = self._shard_of[number], self._tensors[number]
        name = self._names[shard]
        self._held.append(value)
        position = index - unit.first
        if (position + 1) % unit.at_once:
            return
        joined, self._held = assembled(unit.tensor, self._held), []
        if position + 1 == unit.at_once and (number == 0 or self._shard_of[number - 1] != shard):
            yield name, self._headers[shard]
        for tensor, expected in zip(self._encoded(unit, joined), unit.stored, strict=True):
            if unit.tensor.stacked is not None and unit.codec is None:
                expected = StoredTensor(expected.name, expected.dtype, expected.shape[1:])
            yield name, tensor_bytes(tensor, expected)

    def decode(self, index: int, folder: Path) -> Tensor | QuantTensor:
        """Tensor number `index`, read back from the files so far."""
        number = self._number_of[index]
        shard, unit = self._shard_of[number], self._tensors[number]
        views, start = {}, len(self._headers[shard]) + self._offsets[number]
        for stored in unit.stored:
            views[stored.name] = View(stored.dtype, start, stored.shape, contiguous_strides(stored.shape))
            start += stored.nbytes
        place, source = unit.tensor.places[index - unit.first], SourceFile(folder / self._names[shard])
        if unit.codec is None:  # some of a stacked tensor may not be there yet
            return read_floats(TensorFile(source, {}), views[unit.tensor.name], unit.tensor, place, None)
        file = TensorFile(source, views)
        raw = RawModule(unit.tensor.module, dict.fromkeys(views, file), file.path)
        return decode(unit.codec, raw, unit.spec, place, None)

    def finish(self) -> Iterator[Chunk]:
        for _, data in self._extra_tensors:
            yield self._names[-1], data

    def extra_files(self) -> dict[str, bytes]:
        if len(self._names) == 1:
            return {}
        weight_map = {stored.name: name for shard, name in enumerate(self._names) for stored in self._listed(shard)}
        index = {"metadata": {"total_size": self._data_bytes}, "weight_map": weight_map}
        return {"model.safetensors.index.json": json.dumps(index, indent=2).encode() + b"\n"}

    @cached_property
    def _headers(self) -> list[bytes]:
        return [build_header(self._listed(shard)) for shard in range(len(self._names))]

    def _listed(self, shard: int) -> list[StoredTensor]:
        pairs = zip(self._tensors, self._shard_of, strict=True)
        found = [stored for tensor, number in pairs if number == shard for stored in tensor.stored]
        return found + [stored for stored, _ in self._extra_tensors] if shard == len(self._names) - 1 else found

    def _encoded(self, unit: _Written, value: Tensor | QuantTensor) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        assert unit.codec is not None, "the plan says which tensors are quantized"
        tensors = unit.codec.encode(value)
        if isinstance(tensors, Reason):
            raise tensors.error(unit.spec.name, self._method)
        return [tensor.view(stored.shape) for tensor, stored in zip(tensors, unit.stored, strict=True)]


def _written(planned: Sequence[TensorSpec], config: ModelConfig, method: QuantMethod) -> list[_Written]:
    names = {spec.name for spec in planned}
    quantized = {spec.name.removesuffix(".weight") for spec in planned if spec.scheme is not None}
    tensors = disk_tensors(config, quantized, joins_experts=bool(quantized) and method.joins_experts)
    found = []
    for tensor, first, spec in units_of(planned, [one for one in tensors if one.parts[0] in names]):
        codec = _codec(spec, method)
        stored = [StoredTensor(spec.name, spec.dtype, spec.shape)] if codec is None else codec.stored(spec)
        by_expert = tensor.stacked is not None and codec is None
        at_once = len(tensor.parts) // tensor.shape[0] if by_expert else len(tensor.parts)
        found.append(_Written(tensor, first, spec, codec, stored, at_once))
    return found


def _codec(spec: TensorSpec, method: QuantMethod) -> Codec | None:
    if spec.scheme is None:
        return None
    codec = method.codec(spec.scheme, embedding=is_embedding(spec.name.removesuffix(".weight")))
    if isinstance(codec, Reason):
        raise codec.error(spec.name, method.name)
    return codec
