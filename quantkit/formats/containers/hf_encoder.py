"""Writing Hugging Face's weights: safetensors, in one file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.formats.codecs.codec import Codec, QuantMethod, RawModule, Reason
from quantkit.formats.container import Chunk, tensor_bytes
from quantkit.formats.files.safetensors_io import build_header
from quantkit.formats.files.source import SourceFile
from quantkit.formats.files.tensor_file import StoredTensor, TensorFile, View, contiguous_strides
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec


class SafetensorsEncoder:
    """Hugging Face shards ``model-0000N-of-0000M.safetensors``, or one ``model.safetensors``."""

    rearranges = False

    def __init__(self, planned: Sequence[TensorSpec], shard_bytes: int, method: QuantMethod) -> None:
        """
        Args:
            method: of the quantized modules.

        Raises:
            UnsupportedError: if it has no codec for a scheme.
        """
        self.planned = planned
        self._method = method.name
        self._codecs = [_codec(spec, method) for spec in planned]
        self._stored = [
            [StoredTensor(spec.name, spec.dtype, spec.shape)] if codec is None else codec.stored(spec)
            for spec, codec in zip(planned, self._codecs, strict=True)
        ]
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
        for tensor, expected in zip(self._tensors(index, value), self._stored[index], strict=True):
            yield name, tensor_bytes(tensor, expected)

    def decode(self, index: int, folder: Path) -> Tensor | QuantTensor:
        """Tensor number `index`, read back from the files so far."""
        shard = self._shard_of[index]
        before = sum(t.nbytes for i in range(index) if self._shard_of[i] == shard for t in self._stored[i])
        views, start = {}, len(self._header(shard)) + before
        for stored in self._stored[index]:
            views[stored.name] = View(stored.dtype, start, stored.shape, contiguous_strides(stored.shape))
            start += stored.nbytes
        file = TensorFile(SourceFile(folder / self._names[shard]), views)
        spec, codec = self.planned[index], self._codecs[index]
        if codec is None:
            return file.read(spec.name)
        raw = RawModule(spec.name.removesuffix(".weight"), dict.fromkeys(views, file), file.path)
        return codec.decode(raw, spec)

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

    def _tensors(self, index: int, value: Tensor | QuantTensor) -> list[Tensor]:
        """What a value is stored as."""
        if isinstance(value, Tensor):
            return [value]
        codec = self._codecs[index]
        assert codec is not None, "the plan says which tensors are quantized"
        tensors = codec.encode(value)
        if isinstance(tensors, Reason):
            raise tensors.error(self.planned[index].name, self._method)
        return tensors


def _codec(spec: TensorSpec, method: QuantMethod) -> Codec | None:
    """What holds a tensor; None for floats."""
    if spec.scheme is None:
        return None
    codec = method.codec(spec.scheme)
    if isinstance(codec, Reason):
        raise codec.error(spec.name, method.name)
    return codec
