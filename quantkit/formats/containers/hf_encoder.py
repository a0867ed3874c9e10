"""Writing Hugging Face's weights: safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.disk import DiskTensor, Place, disk_tensors
from quantkit.architectures.names import is_embedding
from quantkit.files.safetensors_io import build_header
from quantkit.files.source import SourceFile
from quantkit.files.tensor_file import StoredTensor, TensorFile, View, contiguous_strides
from quantkit.formats.codecs.codec import Codec, QuantMethod, Reason, Weight
from quantkit.formats.codecs.raw_module import RawModule
from quantkit.formats.container import Chunk, tensor_bytes
from quantkit.formats.containers.hf_parts import decode_place, read_floats
from quantkit.formats.containers.layout import ShardedEncoder, Unit, assign_file_numbers, plan_units
from quantkit.formats.kv_scales import is_scale
from quantkit.tensors.late import torch
from quantkit.tensors.scheme import TILE, QuantScheme, Scales
from quantkit.tensors.spec import TensorSpec


@dataclass(frozen=True)
class _Written(Unit):
    """A unit with the tensors that store it, and the codec of a quantized module; None for
    floats.
    """

    codec: Codec | None
    stored: Sequence[StoredTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored)


class SafetensorsEncoder(ShardedEncoder[_Written]):
    """Hugging Face shards ``model-0000N-of-0000M.safetensors``, or one ``model.safetensors``, with
    the tensors that a family has on disk.
    """

    def __init__(
        self,
        planned: Sequence[TensorSpec],
        config: ModelConfig,
        shard_bytes: int,
        method: QuantMethod,
        extra_tensors: Sequence[tuple[StoredTensor, bytes]] = (),
    ) -> None:
        """
        Args:
            planned: canonical tensors, in the order of `disk_tensors`, and scales of a KV cache
                among them.
            method: of the quantized modules.
            extra_tensors: small tensors besides the model's, with their bytes, at the end of the
                last file.

        Raises:
            UnsupportedError: if it has no codec for a scheme, or the parts of a tensor differ in
                scheme or float type.
        """
        units = _plan_units(planned, config, method)
        sizes = [unit.nbytes for unit in units]
        super().__init__(planned, units, sizes, assign_file_numbers(sizes, shard_bytes))
        self._method = method.name
        self._extra_tensors = extra_tensors
        self._data_bytes = sum(sizes) + sum(len(data) for _, data in extra_tensors)
        count = self._file_of_unit[-1] + 1
        # transformers looks for a single file under its name without numbers.
        if count == 1:
            self._names = ["model.safetensors"]
        else:
            self._names = []
            for number in range(1, count + 1):
                self._names.append(f"model-{number:05d}-of-{count:05d}.safetensors")
        self._headers = [build_header(self._list_shard_tensors(shard)) for shard in range(count)]

    @property
    def rearranges(self) -> bool:
        return not all(unit.tensor.whole for unit in self._units)

    @property
    def max_buffered_bytes(self) -> int:
        max_bytes = 0
        for unit in self._units:
            # Other tensors are written as they come.
            if len(unit.tensor.places) < 2:
                continue
            unit_bytes = 0
            for spec in self.planned[unit.first : unit.first + unit.at_once]:
                unit_bytes += math.prod(spec.shape) * spec.dtype.itemsize
            max_bytes = max(max_bytes, unit_bytes)
        return max_bytes

    def total_bytes(self) -> int:
        return self._data_bytes + sum(map(len, self._headers))

    def decode(self, index: int, folder: Path) -> Weight:
        """Read tensor number `index` back from the files so far."""
        (number,) = self._units_of_tensor[index]
        shard = self._file_of_unit[number]
        unit = self._units[number]
        views = {}
        start = len(self._headers[shard]) + self._offsets[number]
        for stored in unit.stored:
            views[stored.name] = View(
                stored.dtype, start, stored.shape, contiguous_strides(stored.shape)
            )
            start += stored.nbytes
        place = unit.tensor.places[index - unit.first]
        source = SourceFile(folder / self._names[shard])
        # Without views, which must be within the file: a stacked tensor may be incomplete.
        if unit.codec is None:
            unchecked_file = TensorFile(source, {})
            view = views[unit.tensor.name]
            return read_floats(unchecked_file, view, unit.tensor, place, None)
        file = TensorFile(source, views)
        raw = RawModule(unit.tensor.module, dict.fromkeys(views, file), file.path)
        return decode_place(unit.codec, raw, unit.spec, unit.tensor, place, None)

    def finish(self) -> Iterator[Chunk]:
        for _, data in self._extra_tensors:
            yield self._names[-1], data

    def extra_files(self) -> dict[str, bytes]:
        if len(self._names) == 1:
            return {}
        weight_map = {}
        for shard, file_name in enumerate(self._names):
            for stored in self._list_shard_tensors(shard):
                weight_map[stored.name] = file_name
        index = {"metadata": {"total_size": self._data_bytes}, "weight_map": weight_map}
        return {"model.safetensors.index.json": json.dumps(index, indent=2).encode() + b"\n"}

    def _list_shard_tensors(self, shard: int) -> list[StoredTensor]:
        tensors: list[StoredTensor] = []
        for unit, unit_shard in zip(self._units, self._file_of_unit, strict=True):
            if unit_shard == shard:
                tensors.extend(unit.stored)
        is_last_shard = shard == len(self._names) - 1
        if is_last_shard:
            for stored, _ in self._extra_tensors:
                tensors.append(stored)
        return tensors

    def _encode_unit(self, unit: _Written, part: int, value: Weight) -> Iterator[memoryview]:
        if isinstance(value, torch.Tensor):
            (stored,) = unit.stored
            # A tensor of all experts arrives one expert at a time.
            if unit.tensor.stacked is None:
                shape = stored.shape
            else:
                shape = stored.shape[1:]
            yield tensor_bytes(value, StoredTensor(stored.name, stored.dtype, shape))
            return
        assert unit.codec is not None, "the plan says which tensors are quantized"
        tensors = unit.codec.encode(value)
        if isinstance(tensors, Reason):
            raise tensors.error(unit.spec.name, self._method)
        for tensor, stored in zip(tensors, unit.stored, strict=True):
            yield tensor_bytes(tensor.view(stored.shape), stored)


def _cut_tile(tensor: DiskTensor, scheme: QuantScheme) -> Place | None:
    """Find the first part of a tensor whose rows share a scale with those of the next part; None
    if none do.
    """
    if scheme.scales is not Scales.TILES:
        return None
    for place in tensor.places[:-1]:
        if place.shape[0] % TILE:
            return place
    return None


def _plan_units(
    planned: Sequence[TensorSpec], config: ModelConfig, method: QuantMethod
) -> list[_Written]:
    names = set()
    quantized = set()
    for spec in planned:
        names.add(spec.name)
        if spec.scheme is not None:
            quantized.add(spec.name.removesuffix(".weight"))
    joins_experts = bool(quantized) and method.joins_experts
    tensors = []
    for tensor in disk_tensors(config, quantized, joins_experts=joins_experts):
        if tensor.parts[0] in names:
            tensors.append(tensor)
    # A model's topology has no scales of a KV cache. Tensors of such names that belong to a model
    # known by its tensors only are listed there.
    listed = {part for tensor in tensors for part in tensor.parts}
    for spec in planned:
        if is_scale(spec.name) and spec.name not in listed:
            tensors.append(DiskTensor(spec.name, spec.shape, (Place(spec.name, spec.shape),)))
    units = []
    for tensor, first, spec in plan_units(planned, tensors):
        embedding = is_embedding(spec.name.removesuffix(".weight"))
        if spec.scheme is None:
            codec = None
        else:
            codec = method.codec(spec.scheme, embedding=embedding)
        if isinstance(codec, Reason):
            raise codec.error(spec.name, method.name)
        # The scales of a tile that contains rows of two parts cannot be those of both.
        part = None if spec.scheme is None else _cut_tile(tensor, spec.scheme)
        if part is not None:
            reason = Reason(
                f"its rows are part of a larger tensor and are not a multiple of {TILE}",
                part.shape[0],
            )
            raise reason.error(part.name, method.name)
        if codec is None:
            stored = [StoredTensor(spec.name, spec.dtype, spec.shape)]
        else:
            stored = codec.list_stored_tensors(spec)
        # Floats of all experts are appended one expert at a time, which buffers less. Codes and
        # scales are separate tensors on disk, so all experts are encoded together.
        by_expert = tensor.stacked is not None and codec is None
        if by_expert:
            at_once = len(tensor.parts) // tensor.shape[0]
        else:
            at_once = len(tensor.parts)
        units.append(_Written(tensor, first, spec, at_once, codec, stored))
    return units
