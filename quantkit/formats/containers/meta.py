"""Meta folders: ``params.json`` with ``consolidated.NN.pth`` model-parallel shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.meta_params import config_to_meta
from quantkit.architectures.topology import Parameter, parameters
from quantkit.data.files import gate_texts
from quantkit.errors import CheckpointError, RequestError
from quantkit.formats.codecs.codec import QuantMethod
from quantkit.formats.container import Chunk, Output, tensor_bytes
from quantkit.formats.containers.meta_checkpoint import MetaCheckpoint, shard_paths, to_interleaved
from quantkit.formats.files.pth_encoder import PthEncoder
from quantkit.formats.files.tensor_file import StoredTensor
from quantkit.formats.folder import OTHER_FILES, json_bytes, present
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.text.compare import first_difference, vocabulary_texts
from quantkit.text.tokenizer import load_tokenizer, original_tokenizer

_TOKENIZER = "tokenizer.model"


class Meta:
    """The container of Meta's own downloads; floats only."""

    name = "meta"
    title = "Meta"
    config_file = "params.json"
    weights: Mapping[str, str] = {"meta": "consolidated.*.pth"}
    methods: Mapping[str, QuantMethod] = {}
    stores_tied_head = True
    states_tokens = False
    model_parallel = True

    def present(self, path: Path) -> list[str]:
        return ["meta"] if path.is_dir() and shard_paths(path) else []

    def indexed(self, path: Path, kind: str) -> bool:
        return False

    def open(self, path: Path, kind: str) -> MetaCheckpoint:
        return MetaCheckpoint(path)

    def encoder(self, output: Output) -> MetaEncoder:
        # Llama 3, the first with a byte-level tokenizer, divides the embedding by rows.
        axis = 0 if output.tokenizer is not None and output.tokenizer.byte_level else 1
        return MetaEncoder(output.planned, output.config, output.model_parallel, embedding_axis=axis)

    def side_files(self, output: Output) -> dict[str, bytes | Path]:
        """
        Raises:
            UnsupportedError: if params.json can't say what the model is.
            CheckpointError: if the source has a tokenizer.model, which Meta's code reads, that is another tokenizer
                than the one it is read with.
        """
        folder = output.source.path
        files: dict[str, bytes | Path] = {self.config_file: json_bytes(config_to_meta(output.config))}
        original = folder / _TOKENIZER
        names = (_TOKENIZER,) if original.is_file() else ("tokenizer.json", "tokenizer_config.json")
        if original.is_file() and (folder / "tokenizer.json").is_file():
            _require_same_tokens(folder, original)
        files.update(present(folder, names + OTHER_FILES[1:]))
        return files

    def notes(self, output: Output) -> list[str]:
        folder = output.source.path
        if output.tokenizer is None or (folder / _TOKENIZER).is_file():
            return []
        return [f"{folder}: has no tokenizer.model; tokenizer.json is written in its place"]


class MetaEncoder:
    """Meta's ``consolidated.NN.pth``: every weight cut along the axis that its sizes divide."""

    rearranges = True

    def __init__(self, planned: Sequence[TensorSpec], config: ModelConfig, shards: int, *, embedding_axis: int) -> None:
        """
        Raises:
            RequestError: if the shards do not divide the heads, the feed-forward width
                or the vocabulary.
        """
        self.planned = planned
        self._config = config
        self._shards = shards
        self._axis = embedding_axis
        self._parameters = _with_head(config)
        _require_divisible(config, shards, embedding_axis)
        stored = [[self._part_of(p, self._parameters[p.name]) for p in planned]] * shards
        self._files = [f"consolidated.{rank:02d}.pth" for rank in range(shards)]
        self._zips = [PthEncoder(f"consolidated.{rank:02d}", part) for rank, part in enumerate(stored)]

    def total_bytes(self) -> int:
        return sum(z.total_bytes for z in self._zips)

    def files(self) -> Sequence[str]:
        return self._files

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        assert isinstance(value, Tensor), "Meta's format holds floats only"
        parameter = self._parameters[self.planned[index].name]
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

    def _part_of(self, planned: TensorSpec, parameter: Parameter) -> StoredTensor:
        shape = list(planned.shape)
        if (axis := self._axis_of(parameter)) is not None:
            shape[axis] //= self._pieces(parameter)
        name = parameter.meta_name
        assert name is not None
        return StoredTensor(name, planned.dtype, tuple(shape))


def _require_same_tokens(folder: Path, path: Path) -> None:
    used, original = load_tokenizer(folder), original_tokenizer(path)
    text = first_difference(original, used, (*gate_texts().values(), *vocabulary_texts(original)))
    if text is not None:
        raise CheckpointError(
            "tokenizer.model is another tokenizer than tokenizer.json", path=path,
            found=f"other tokens for {text[:40]!r}", hint="remove the one that is not the model's",
        )  # fmt: skip


def _with_head(config: ModelConfig) -> dict[str, Parameter]:
    """The tensors of a model, the head among them even where it is tied: readers of Meta's format expect it."""
    return {p.name: p for p in parameters(replace(config, tied_embeddings=False))}


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
            raise RequestError(f"{shards} shards do not divide the {name}", found=size, hint="choose another `mp`")
    kv_heads = config.num_kv_heads
    if kv_heads % shards and shards % kv_heads:
        raise RequestError(f"{shards} shards neither divide nor are a multiple of the KV heads", found=kv_heads)
