"""A model over devices, and one text that it continues."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from quantkit.architectures.config import ModelConfig
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import FLOAT_DTYPES, Checkpoint, schemes
from quantkit.model.decoder import Decoder
from quantkit.progress import Progress, silent
from quantkit.runtime.sampling import SamplingParams
from quantkit.xla.devices import device_mesh
from quantkit.xla.model import sharded_decoder
from quantkit.xla.programs import CHUNK, Sampling, cache_shape, chunk_program, prefill_program
from quantkit.xla.split import Layout
from quantkit.xla.weights import float_dtype, load_state, zeros


@dataclass(frozen=True)
class XlaModel:
    """A decoder, its weights in the memory of devices.

    Attributes:
        dtype: of activations and cache.
    """

    layout: Layout
    mesh: Mesh
    decoder: Decoder
    state: dict[str, jax.Array]
    dtype: torch.dtype

    @property
    def config(self) -> ModelConfig:
        return self.layout.config

    @property
    def leads(self) -> bool:
        """Whether this is the first of several hosts' processes, which speaks for all."""
        return bool(jax.process_index() == 0)

    @cached_property
    def prefill(self) -> Any:
        return prefill_program(self.decoder, self.mesh)

    @cached_property
    def greedy_chunk(self) -> Any:
        return chunk_program(self.decoder, self.mesh, greedy=True)

    @cached_property
    def sampled_chunk(self) -> Any:
        return chunk_program(self.decoder, self.mesh, greedy=False)


def model_on_devices(
    checkpoint: Checkpoint, *, devices: int | None = None, dtype: torch.dtype | None = None,
    multi_host: bool = False, progress: Progress = silent,
) -> XlaModel:  # fmt: skip
    """Put a checkpoint's weights on devices; quantized ones stay quantized.

    Args:
        devices: how many; None takes all.
        dtype: of activations and float weights; None is the checkpoint's own.
        multi_host: see `device_mesh`.

    Raises:
        RequestError: if there are too few devices, or they do not divide the heads.
        QuantkitError: as reading the checkpoint does.
    """
    mesh = device_mesh(devices, multi_host=multi_host)
    layout = Layout(checkpoint.config, schemes(checkpoint), mesh.size)
    dtype = dtype or FLOAT_DTYPES[checkpoint.config.dtype]
    state = load_state(checkpoint, layout, mesh, dtype, progress=progress)
    return XlaModel(layout, mesh, sharded_decoder(layout), state, dtype)


_UNUSED = Sampling.of(0, 0, SamplingParams())


class Text:
    """A text in the cache of a model; it grows by chunks."""

    def __init__(self, model: XlaModel, tokens: np.ndarray[Any, Any], length: int, capacity: int) -> None:
        """Run the prompt.

        Args:
            tokens: [B, T], of which the first `length` are the prompt and the others padding.
            capacity: positions that the cache has.

        Raises:
            RequestError: if the tokens are more than that.
        """
        if tokens.shape[1] > capacity:
            raise RequestError("the prompt exceeds the cache", found=tokens.shape[1], expected=f"at most {capacity}")
        self.position = length
        self.capacity = capacity
        self._model = model
        shape = cache_shape(model.layout, tokens.shape[0], capacity)
        layers = range(model.config.num_layers)
        cache = tuple([zeros(model.mesh, shape, float_dtype(model.dtype)) for _ in layers] for _ in range(2))
        self._cache, self.logits = model.prefill(model.state, cache, tokens.astype(np.int32), np.int32(length))

    def grow(self, sampling: Sampling | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Draw `CHUNK` tokens: [CHUNK, B], and whether the logits of each were finite, [CHUNK].

        Args:
            sampling: how; None takes the likeliest.

        Raises:
            RequestError: if the cache has no room for them. Beyond its end XLA would write over its last
                positions, without a word.
        """
        if self.position + CHUNK > self.capacity:
            raise RequestError(
                "the cache is full", found=f"{self.position} of {self.capacity} positions", expected=f"room for {CHUNK}"
            )
        program = self._model.greedy_chunk if sampling is None else self._model.sampled_chunk
        self._cache, self.logits, tokens, finite = program(
            self._model.state, self._cache, self.logits, np.int32(self.position), sampling or _UNUSED
        )
        self.position += CHUNK
        return np.asarray(tokens), np.asarray(finite)
