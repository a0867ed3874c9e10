"""How planned tensors become bytes of files: safetensors shards, or Meta's ``.pth`` shards.

An encoder only ever appends, in one fixed order, so an interrupted output can be
continued from any tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters
from quantkit.errors import RequestError
from quantkit.formats import compressed_tensors as ct
from quantkit.formats.meta import to_interleaved
from quantkit.formats.pth_encoder import PthEncoder
from quantkit.formats.safetensors_io import build_header
from quantkit.formats.tensor_file import StoredTensor
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

Chunk = tuple[str, bytes | memoryview]


@dataclass(frozen=True)
class Planned:
    """One tensor of the output: canonical name, shape, float dtype (of the scales, if quantized)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: QuantScheme | None = None


class Encoder(Protocol):
    """Turns the values of a fixed list of planned tensors, in order, into file chunks."""

    planned: Sequence[Planned]

    def total_bytes(self) -> int:
        """Size of all files, or a little more."""
        ...

    def files(self) -> Sequence[str]:
        """The names of the files that tensors go to."""
        ...

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        """What tensor number `index` appends to which file."""
        ...

    def finish(self) -> Iterator[Chunk]:
        """What the files end with."""
        ...

    def state(self) -> Any:
        """JSON from which `restore` continues."""
        ...

    def restore(self, state: Any) -> None: ...

    def extra_files(self) -> dict[str, bytes]:
        """Small files that belong to the weights, such as an index."""
        ...


class SafetensorsEncoder:
    """Hugging Face shards ``model-0000N-of-0000M.safetensors``, or one ``model.safetensors``."""

    def __init__(self, planned: Sequence[Planned], shard_bytes: int) -> None:
        self.planned = planned
        self._stored = [_stored(p) for p in planned]
        self._shard_of: list[int] = []
        filled = 0
        for tensors in self._stored:
            size = sum(t.nbytes for t in tensors)
            if not self._shard_of:
                self._shard_of.append(0)
            else:
                full = filled + size > shard_bytes
                self._shard_of.append(self._shard_of[-1] + full)
                filled = 0 if full else filled
            filled += size
        count = self._shard_of[-1] + 1
        self._names = [
            "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
        ]

    def total_bytes(self) -> int:
        data = sum(t.nbytes for tensors in self._stored for t in tensors)
        return data + sum(len(self._header(shard)) for shard in range(len(self._names)))

    def files(self) -> Sequence[str]:
        return self._names

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        shard = self._shard_of[index]
        name = self._names[shard]
        if index == 0 or self._shard_of[index - 1] != shard:
            yield name, self._header(shard)
        tensors = ct.encode(value) if isinstance(value, QuantTensor) else [value]
        for tensor, expected in zip(tensors, self._stored[index], strict=True):
            yield name, tensor_bytes(tensor, expected)

    def decode(self, index: int, folder: Path) -> Tensor | QuantTensor:
        """Tensor number `index`, read back from the files so far."""
        shard = self._shard_of[index]
        before = sum(t.nbytes for i in range(index) if self._shard_of[i] == shard for t in self._stored[i])
        tensors = {}
        with (folder / self._names[shard]).open("rb") as file:
            file.seek(len(self._header(shard)) + before)
            for stored in self._stored[index]:
                data = torch.frombuffer(bytearray(file.read(stored.nbytes)), dtype=stored.dtype)
                tensors[stored.name] = data.view(stored.shape)
        item = self.planned[index]
        if item.scheme is None:
            return tensors[item.name]
        module = item.name.removesuffix("weight")
        rows, columns = item.shape
        return ct.decode(item.scheme, (rows, columns), lambda suffix, _: tensors[module + suffix])

    def finish(self) -> Iterator[Chunk]:
        return iter(())

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        pass

    def extra_files(self) -> dict[str, bytes]:
        if len(self._names) == 1:
            return {}
        total = sum(t.nbytes for tensors in self._stored for t in tensors)
        weight_map = {
            t.name: self._names[shard]
            for tensors, shard in zip(self._stored, self._shard_of, strict=True)
            for t in tensors
        }
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return {"model.safetensors.index.json": json.dumps(index, indent=2).encode() + b"\n"}

    def _header(self, shard: int) -> bytes:
        pairs = zip(self._stored, self._shard_of, strict=True)
        return build_header([t for tensors, home in pairs if home == shard for t in tensors])


class MetaEncoder:
    """Meta's ``consolidated.NN.pth``: every weight split over the shards as the table says."""

    def __init__(self, planned: Sequence[Planned], config: ModelConfig, shards: int, *, embedding_axis: int) -> None:
        """
        Raises:
            RequestError: if the shards do not divide the heads, the feed-forward width
                or the vocabulary.
        """
        self.planned = planned
        self._config = config
        self._shards = shards
        self._axis = embedding_axis
        self._entries = _with_head(config)
        _require_divisible(config, shards, embedding_axis)
        stored = [[self._part_of(p, self._entries[p.name]) for p in planned]] * shards
        self._files = [f"consolidated.{rank:02d}.pth" for rank in range(shards)]
        self._zips = [PthEncoder(f"consolidated.{rank:02d}", part) for rank, part in enumerate(stored)]

    def total_bytes(self) -> int:
        return sum(z.total_bytes for z in self._zips)

    def files(self) -> Sequence[str]:
        return self._files

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        assert isinstance(value, Tensor), "Meta's format holds floats only"
        parameter = self._entries[self.planned[index].name]
        if parameter.rotary:
            value = to_interleaved(value, self._config.head_dim)
        part = self._part_of(self.planned[index], parameter)
        for rank, (file, encoder) in enumerate(zip(self._files, self._zips, strict=True)):
            data = tensor_bytes(self._slice(value, parameter, rank), part)
            if index == 0:
                yield file, encoder.start()
            yield file, encoder.before(index, data)
            yield file, data

    def finish(self) -> Iterator[Chunk]:
        for file, encoder in zip(self._files, self._zips, strict=True):
            yield file, encoder.end()

    def state(self) -> Any:
        return [encoder.state() for encoder in self._zips]

    def restore(self, state: Any) -> None:
        for encoder, saved in zip(self._zips, state, strict=True):
            encoder.restore(saved)

    def extra_files(self) -> dict[str, bytes]:
        return {}

    def _slice(self, value: Tensor, parameter: Parameter, rank: int) -> Tensor:
        axis = self._axis_of(parameter)
        if axis is None:
            return value
        pieces = self._pieces(parameter)
        size = value.shape[axis] // pieces
        return value.narrow(axis, rank * pieces // self._shards * size, size)

    def _pieces(self, parameter: Parameter) -> int:
        """Into how many different pieces a tensor is cut; fewer than shards where KV heads repeat."""
        return min(self._shards, self._config.num_kv_heads) if parameter.dims[0] == "kv" else self._shards

    def _axis_of(self, parameter: Parameter) -> int | None:
        return self._axis if parameter.role == "embedding" else parameter.split_axis

    def _part_of(self, planned: Planned, parameter: Parameter) -> StoredTensor:
        shape = list(planned.shape)
        if (axis := self._axis_of(parameter)) is not None:
            shape[axis] //= self._pieces(parameter)
        name = parameter.meta_name
        assert name is not None
        return StoredTensor(name, planned.dtype, tuple(shape))


def tensor_bytes(tensor: Tensor, expected: StoredTensor) -> memoryview:
    """The bytes of a tensor, held to what was planned for it."""
    if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
        raise ValueError(
            f"{expected.name}: planned {expected.dtype} {expected.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _stored(planned: Planned) -> list[StoredTensor]:
    if planned.scheme is None:
        return [StoredTensor(planned.name, planned.dtype, planned.shape)]
    return ct.stored(planned.name, planned.shape, planned.dtype, planned.scheme)


def _with_head(config: ModelConfig) -> dict[str, Parameter]:
    """The table's entries, the output projection among them even where it is tied:
    readers of Meta's format expect it."""
    return {e.name: e for e in parameters(replace(config, tied_embeddings=False))}


def _require_divisible(config: ModelConfig, shards: int, embedding_axis: int) -> None:
    sizes = {
        "attention heads": config.num_heads,
        "feed-forward width": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    if embedding_axis == 1:
        sizes["hidden size"] = config.hidden_size
    for name, size in sizes.items():
        if shards < 1 or size % shards:
            raise RequestError(f"{shards} shards do not divide the {name}", found=size, hint="choose another --mp")
    kv_heads = config.num_kv_heads
    if kv_heads % shards and shards % kv_heads:
        raise RequestError(f"{shards} shards neither divide nor are a multiple of the KV heads", found=kv_heads)
