"""Hugging Face folders: ``config.json`` with safetensors, or ``pytorch_model*.bin`` to read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.families import config_to_hf
from quantkit.architectures.topology import linear_columns
from quantkit.formats.codecs.codec import Codec, QuantMethod, RawModule, Reason
from quantkit.formats.container import Chunk, Output, tensor_bytes
from quantkit.formats.containers.hf_checkpoint import SETTINGS, HFCheckpoint, index_path, read_codecs, weight_kinds
from quantkit.formats.files.safetensors_io import build_header
from quantkit.formats.files.source import SourceFile
from quantkit.formats.files.tensor_file import StoredTensor, TensorFile, View, contiguous_strides
from quantkit.formats.folder import OTHER_FILES, TOKENIZER_FILES, json_bytes, present
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme
from quantkit.tensors.spec import TensorSpec
from quantkit.text.export import export_json


class HuggingFace:
    """The container of most published models."""

    name = "hf"
    title = "Hugging Face"
    config_file = "config.json"
    weights: Mapping[str, str] = {"safetensors": "safetensors", "bin": "pytorch_model*.bin"}
    stores_tied_head = False
    states_tokens = True
    model_parallel = False

    def __init__(self, methods: Mapping[str, QuantMethod], native: QuantMethod) -> None:
        """
        Args:
            methods: by ``quant_method``.
            native: the one that is written where none is asked for.
        """
        self.methods = methods
        self._native = native

    def present(self, path: Path) -> list[str]:
        return weight_kinds(path) if path.is_dir() else []

    def indexed(self, path: Path, kind: str) -> bool:
        return index_path(path, kind).is_file()

    def open(self, path: Path, kind: str) -> HFCheckpoint:
        return HFCheckpoint(path, kind, self.methods)

    def schemes(self, raw: Mapping[str, Any], config: ModelConfig, path: Path) -> dict[str, QuantScheme]:
        """The scheme of every module that a config.json quantizes, whether or not there are weights.

        Raises:
            CheckpointError, UnsupportedError: see `QuantMethod.read_settings`.
        """
        _, codecs = read_codecs(raw, linear_columns(config), path, self.methods)
        return {module: codec.scheme for module, codec in codecs.items() if codec.scheme is not None}

    def encoder(self, output: Output) -> SafetensorsEncoder:
        return SafetensorsEncoder(output.planned, output.shard_bytes, output.method or self._native)

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        source, config = output.source, output.config
        raw: dict[str, Any] = {**source.extra_config, **config_to_hf(config)}
        if output.schemes:
            modules = linear_columns(replace(config, tied_embeddings=False))
            raw[SETTINGS] = (output.method or self._native).write_settings(output.schemes, modules)
        files: dict[str, bytes | Path] = {self.config_file: json_bytes(raw)}
        files.update(present(source.path, TOKENIZER_FILES + OTHER_FILES))
        if source.format != self.name:
            files.update(_exported_tokenizer(source.path))
            ids = {"bos_token_id": raw["bos_token_id"], "eos_token_id": raw["eos_token_id"]}
            files.setdefault("generation_config.json", json_bytes({k: v for k, v in ids.items() if v is not None}))
        return files

    def notes(self, output: Output) -> list[str]:
        return []


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


def _exported_tokenizer(folder: Path) -> dict[str, bytes]:
    """A tokenizer.json for a tokenizer that came from Meta, or where that would not
    tokenize alike, just the settings with which transformers reads the original."""
    path = folder / "tokenizer.model"
    if not path.is_file() or (folder / "tokenizer.json").is_file():
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        exported = export_json(path, Path(scratch))
    if exported is not None:
        return exported
    return {"tokenizer_config.json": json_bytes({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})}
