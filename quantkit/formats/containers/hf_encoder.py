"""Writing Hugging Face's weights: safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, disk_tensors
from quantkit.architectures.names import is_embedding
from quantkit.errors import UnsupportedError
from quantkit.files.safetensors_io import build_header
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import StoredTensor, TensorFile, View, contiguous_strides
from quantkit.formats.codecs.codec import Codec, QuantMethod, RawModule, Reason
from quantkit.formats.container import Chunk, tensor_bytes
from quantkit.formats.containers.hf_parts import assembled, decode, read_floats
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec


@dataclass(frozen=True)
class _Written:
    """A tensor on disk, or the several of a quantized module.

    Attributes:
        first: the index of its first part among the planned tensors.
        spec: its name on disk, shape, float type and scheme.
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


class SafetensorsEncoder:
    """Hugging Face shards ``model-0000N-of-0000M.safetensors``, or one ``model.safetensors``, with the tensors that a
    family has on disk. The parts of one follow each other in the plan, and are held until they are all there."""

    def __init__(
        self, planned: Sequence[TensorSpec], config: ModelConfig, shard_bytes: int, method: QuantMethod,
        extra_tensors: Sequence[tuple[StoredTensor, bytes]] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            planned: canonical tensors, in the order of `disk_tensors`.
            method: of the quantized modules.
            extra_tensors: small tensors that are none of the model's, with their bytes; they end the last file.

        Raises:
            UnsupportedError: if it has no codec for a scheme, or the parts of a tensor differ in scheme or float type.
        """
        self.planned = planned
        self._method = method.name
        self._extra_tensors = extra_tensors
        self._tensors = _written(planned, config, method)
        self._unit_of = [number for number, one in enumerate(self._tensors) for _ in one.tensor.places]
        self._held: list[Tensor | QuantTensor] = []
        self._shard_of: list[int] = []
        self._starts: list[int] = []  # behind the shard's header
        filled = 0
        for tensor in self._tensors:
            if not self._shard_of:
                self._shard_of.append(0)
            else:
                full = filled + tensor.nbytes > shard_bytes
                self._shard_of.append(self._shard_of[-1] + full)
                filled = 0 if full else filled
            self._starts.append(filled)
            filled += tensor.nbytes
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
        return self._data_bytes + sum(self._header_sizes)

    @property
    def _data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors) + sum(len(data) for _, data in self._extra_tensors)

    def files(self) -> Sequence[str]:
        return self._names

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        number = self._unit_of[index]
        shard, unit = self._shard_of[number], self._tensors[number]
        name = self._names[shard]
        self._held.append(value)
        position = index - unit.first
        if (position + 1) % unit.at_once:
            return
        joined, self._held = assembled(unit.tensor, self._held), []
        if position + 1 == unit.at_once and (number == 0 or self._shard_of[number - 1] != shard):
            yield name, self._header(shard)
        for tensor, expected in zip(self._encoded(unit, joined), unit.stored, strict=True):
            if unit.tensor.stacked is not None and unit.codec is None:
                expected = StoredTensor(expected.name, expected.dtype, expected.shape[1:])
            yield name, tensor_bytes(tensor, expected)

    def decode(self, index: int, folder: Path) -> Tensor | QuantTensor:
        """Tensor number `index`, read back from the files so far."""
        number = self._unit_of[index]
        shard, unit = self._shard_of[number], self._tensors[number]
        views, start = {}, self._header_sizes[shard] + self._starts[number]
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

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        pass

    def extra_files(self) -> dict[str, bytes]:
        if len(self._names) == 1:
            return {}
        weight_map = {stored.name: name for shard, name in enumerate(self._names) for stored in self._listed(shard)}
        index = {"metadata": {"total_size": self._data_bytes}, "weight_map": weight_map}
        return {"model.safetensors.index.json": json.dumps(index, indent=2).encode() + b"\n"}

    @cached_property
    def _header_sizes(self) -> list[int]:
        return [len(self._header(shard)) for shard in range(len(self._names))]

    def _header(self, shard: int) -> bytes:
        return build_header(self._listed(shard))

    def _listed(self, shard: int) -> list[StoredTensor]:
        """The tensors of a file."""
        pairs = zip(self._tensors, self._shard_of, strict=True)
        found = [stored for tensor, home in pairs if home == shard for stored in tensor.stored]
        return found + [stored for stored, _ in self._extra_tensors] if shard == len(self._names) - 1 else found

    def _encoded(self, unit: _Written, value: Tensor | QuantTensor) -> list[Tensor]:
        """What a value is stored as."""
        if isinstance(value, Tensor):
            return [value]
        assert unit.codec is not None, "the plan says which tensors are quantized"
        tensors = unit.codec.encode(value)
        if isinstance(tensors, Reason):
            raise tensors.error(unit.spec.name, self._method)
        return [tensor.view(stored.shape) for tensor, stored in zip(tensors, unit.stored, strict=True)]


def _written(planned: Sequence[TensorSpec], config: ModelConfig, method: QuantMethod) -> list[_Written]:
    """The tensors on disk that the planned ones make, in their order."""
    quantized = {spec.name.removesuffix(".weight") for spec in planned if spec.scheme is not None}
    joins = bool(quantized) and method.joins_experts
    known = {tensor.places[0].name: tensor for tensor in disk_tensors(config, quantized, joins_experts=joins)}
    found: list[_Written] = []
    start = 0
    while start < len(planned):
        tensor = known.get(planned[start].name)
        parts = planned[start : start + len(tensor.places)] if tensor is not None else ()
        if tensor is None or tuple(part.name for part in parts) != tensor.parts:
            raise ValueError(f"{planned[start].name} does not begin the next tensor on disk")
        spec = joined_spec(tensor, parts)
        codec = _codec(spec, method)
        stored = [StoredTensor(spec.name, spec.dtype, spec.shape)] if codec is None else codec.stored(spec)
        by_expert = tensor.stacked is not None and codec is None
        at_once = len(parts) // tensor.shape[0] if by_expert else len(parts)
        found.append(_Written(tensor, start, spec, codec, stored, at_once))
        start += len(parts)
    return found


def joined_spec(tensor: DiskTensor, parts: Sequence[TensorSpec]) -> TensorSpec:
    """What a tensor on disk is, whose parts must be alike."""
    first = parts[0]
    for part in parts[1:]:
        if (part.dtype, part.scheme) != (first.dtype, first.scheme):
            raise UnsupportedError(
                f"'{first.name}' and '{part.name}' are one tensor on disk, '{tensor.name}', but differ",
                found=f"{first.scheme or first.dtype} and {part.scheme or part.dtype}",
                hint="convert the source to one float type first",
            )  # fmt: skip
    return TensorSpec(tensor.name, tensor.shape, first.dtype, first.scheme)


def _codec(spec: TensorSpec, method: QuantMethod) -> Codec | None:
    """What holds a tensor; None for floats."""
    if spec.scheme is None:
        return None
    codec = method.codec(spec.scheme, embedding=is_embedding(spec.name.removesuffix(".weight")))
    if isinstance(codec, Reason):
        raise codec.error(spec.name, method.name)
    return codec
