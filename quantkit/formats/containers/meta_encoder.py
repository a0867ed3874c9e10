"""Writing Meta's weights: ``consolidated.NN.pth``, each tensor cut for model parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.topology import Parameter, parameters
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.files.pth_encoder import PthEncoder
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats.container import Chunk, Encoder, tensor_bytes
from quantkit.formats.containers.meta_tensors import meta_name, to_interleaved
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec


class MetaEncoder(Encoder):
    """Meta's ``consolidated.NN.pth``: each weight is split along the axis that model parallelism
    divides.
    """

    rearranges = True

    def __init__(
        self,
        planned: Sequence[TensorSpec],
        config: ModelConfig,
        shards: int,
        *,
        embedding_axis: int,
    ) -> None:
        """
        Raises:
            RequestError: if the shards do not divide the heads, the feed-forward width or the
                vocabulary.
        """
        self.planned = planned
        self._config = config
        self._shards = shards
        self._axis = embedding_axis
        # With the head even if it is tied: readers of Meta's format expect it.
        self._parameters: dict[str, Parameter] = {}
        for parameter in parameters(replace(config, tied_embeddings=False)):
            self._parameters[parameter.name] = parameter
        _require_divisible(config, shards, embedding_axis)
        stored = [self._part_of(spec, self._parameters[spec.name]) for spec in planned]
        self._zips: dict[str, PthEncoder] = {}
        for rank in range(shards):
            stem = f"consolidated.{rank:02d}"
            self._zips[f"{stem}.pth"] = PthEncoder(stem, stored)

    def total_bytes(self) -> int:
        return sum(encoder.total_bytes for encoder in self._zips.values())

    def files(self) -> Sequence[str]:
        return list(self._zips)

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        assert isinstance(value, Tensor), "Meta's format does not support quantized weights"
        parameter = self._parameters[self.planned[index].name]
        if parameter.rotary:
            value = to_interleaved(value, self._config.head_dim)
        part = self._part_of(self.planned[index], parameter)
        # Every tensor goes to all shards, so all files grow together.
        for rank, (file, encoder) in enumerate(self._zips.items()):
            data = tensor_bytes(self._slice(value, parameter, rank), part)
            if index == 0:
                yield file, encoder.start()
            yield file, encoder.before(index, data)
            yield file, data

    def finish(self) -> Iterator[Chunk]:
        for file, encoder in self._zips.items():
            yield file, encoder.end()

    def state(self) -> Any:
        return [encoder.state() for encoder in self._zips.values()]

    def restore(self, state: Any) -> None:
        for encoder, saved in zip(self._zips.values(), state, strict=True):
            encoder.restore(saved)

    def _slice(self, value: Tensor, parameter: Parameter, rank: int) -> Tensor:
        axis = self._axis_of(parameter)
        if axis is None:
            return value
        pieces = self._pieces(parameter)
        size = value.shape[axis] // pieces
        # Consecutive shards share a piece if there are fewer pieces than shards.
        piece = rank * pieces // self._shards
        return value.narrow(axis, piece * size, size)

    def _pieces(self, parameter: Parameter) -> int:
        """Count the different pieces of a tensor; fewer than shards if KV heads repeat."""
        if parameter.dims[0] == "kv":
            return min(self._shards, self._config.num_kv_heads)
        return self._shards

    def _axis_of(self, parameter: Parameter) -> int | None:
        if parameter.role == "embedding":
            return self._axis
        return parameter.split_axis

    def _part_of(self, planned: TensorSpec, parameter: Parameter) -> StoredTensor:
        shape = list(planned.shape)
        axis = self._axis_of(parameter)
        if axis is not None:
            shape[axis] //= self._pieces(parameter)
        return StoredTensor(meta_name(parameter), planned.dtype, tuple(shape))


def _require_divisible(config: ModelConfig, shards: int, embedding_axis: int) -> None:
    sizes = {"attention heads": config.num_heads, "feed-forward width": config.intermediate_size}
    sizes["vocabulary"] = config.vocab_size
    if embedding_axis == 1:
        sizes["hidden size"] = config.hidden_size
    for name, size in sizes.items():
        if shards < 1 or size % shards:
            raise RequestError(
                f"{shards} shards do not divide the {name}",
                found=size,
                hint=Message("choose another ", Option("mp")),
            )
    # More shards than KV heads repeat each head the same number of times.
    kv_heads = config.num_kv_heads
    if kv_heads % shards and shards % kv_heads:
        raise RequestError(
            f"{shards} shards neither divide nor are a multiple of the KV heads", found=kv_heads
        )
