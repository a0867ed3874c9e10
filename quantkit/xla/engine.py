"""A model over the devices that JAX finds, and generation with it.

A prompt is padded to a bucket; then come chunks of tokens, until an end token.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import Mesh

from quantkit.architectures.config import ModelConfig
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.kernels.build import cache_folder
from quantkit.model.decoder import Decoder
from quantkit.progress import Progress, silent
from quantkit.runtime.engine import bucket as power_of_two
from quantkit.runtime.request import MAX_NEW_TOKENS, TokenIds, checked_count, checked_length, prompt_ids
from quantkit.runtime.sampling_params import SamplingParams
from quantkit.tensors.dtypes import DType
from quantkit.tensors.finite import nonfinite_logits
from quantkit.xla.model import sharded_decoder
from quantkit.xla.products import AXIS
from quantkit.xla.programs import CHUNK, Sampling, cache_shape, chunk_program, prefill_program
from quantkit.xla.split import DeviceSplit
from quantkit.xla.weights import float_dtype, load_state, zeros

_LEAST, _STEP = 32, 512  # buckets are powers of two from the one to the other, then multiples of it
_UNUSED = Sampling.of(0, 0, SamplingParams())


@dataclass(frozen=True)
class XlaModel:
    """A decoder, its weights in the memory of devices.

    Attributes:
        dtype: of activations and cache.
    """

    split: DeviceSplit
    mesh: Mesh
    decoder: Decoder
    state: dict[str, jax.Array]
    dtype: torch.dtype

    @property
    def config(self) -> ModelConfig:
        return self.split.config

    @property
    def tokens_at_once(self) -> int:
        """Tokens that `generate` gives out together."""
        return CHUNK

    @property
    def first(self) -> bool:
        """Whether this process speaks for those of all hosts."""
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

    def generate(
        self, ids: TokenIds, *, max_new_tokens: int = MAX_NEW_TOKENS, temperature: float = 0.0,
        top_p: float = 1.0, seed: int | None = None,
    ) -> Iterator[int]:  # fmt: skip
        """What `quantkit.generate` does. The same seed draws other tokens than there.

        Raises:
            RequestError, NonFiniteError: as there.
        """
        params = SamplingParams(temperature, top_p, seed)
        prompt = prompt_ids(ids)
        length = checked_length(self.config, prompt, checked_count(max_new_tokens))
        return _tokens(self, prompt, length - len(prompt), params)


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
    split = DeviceSplit(checkpoint.config, schemes(checkpoint), mesh.size)
    dtype = dtype or DType(checkpoint.config.dtype).torch
    state = load_state(checkpoint, split, mesh, dtype, progress=progress)
    return XlaModel(split, mesh, sharded_decoder(split), state, dtype)


def device_mesh(count: int | None, *, multi_host: bool = False) -> Mesh:
    """A line of devices.

    Args:
        count: how many; None takes all.
        multi_host: whether other processes, each started in the same way, have devices as well. JAX finds them
            on a TPU pod and under Slurm; elsewhere ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
            ``JAX_PROCESS_ID`` say where they are.

    Raises:
        RequestError: if there are fewer devices, or a host's would be left out.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        if multi_host:
            jax.distributed.initialize(num_processes=_number("JAX_NUM_PROCESSES"), process_id=_number("JAX_PROCESS_ID"))
        devices = jax.devices()
    except (RuntimeError, ValueError) as error:
        raise RequestError(f"JAX finds no devices: {error}") from error
    count = len(devices) if count is None else count
    if count < 1:
        raise RequestError("devices must be at least 1", found=count)
    if count > len(devices):
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes virtual ones"
        raise RequestError(
            "too few devices", found=f"{len(devices)} of kind {devices[0].device_kind}", expected=count,
            hint=flag if devices[0].platform == "cpu" else None,
        )  # fmt: skip
    if multi_host and count < len(devices):
        raise RequestError("with several hosts all devices take part", found=count, expected=len(devices))
    if count < len(devices):
        return Mesh(np.array(devices[:count]), (AXIS,))
    return Mesh(mesh_utils.create_device_mesh((count,), devices), (AXIS,))


def _number(variable: str) -> int | None:
    value = os.environ.get(variable)
    return None if value is None else int(value)


class CachedText:
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
        shape = cache_shape(model.split, tokens.shape[0], capacity)
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


def bucket(length: int) -> int:
    """A length that many share, so that what is compiled for one serves all: no shorter, at most twice as long."""
    return power_of_two(length, _LEAST) if length <= _STEP else -(-length // _STEP) * _STEP


def _tokens(model: XlaModel, ids: list[int], count: int, params: SamplingParams) -> Iterator[int]:
    padded = min(bucket(len(ids)), model.config.max_context)  # beyond it, some rotary scalings change
    prompt = np.zeros((1, padded), np.int32)
    prompt[0, : len(ids)] = ids
    chunks = -(-count // CHUNK)
    text = CachedText(model, prompt, len(ids), bucket(max(padded, len(ids) + chunks * CHUNK)))
    seed = _shared_seed(params.seed) if params.temperature else 0
    for done in range(chunks):
        sampling = Sampling.of(seed, done, params) if params.temperature else None
        tokens, finite = text.grow(sampling)
        for token, fine in zip(tokens[: count - done * CHUNK, 0].tolist(), finite.tolist(), strict=False):
            if not fine:
                raise nonfinite_logits()
            if token in model.config.eos_token_ids:
                return
            yield token


def _shared_seed(seed: int | None) -> int:
    """A seed in 64 bits, the same for the processes of all hosts."""
    words = np.array(divmod((secrets.randbits(64) if seed is None else seed) % 2**64, 2**32), np.uint32)
    high, low = multihost_utils.broadcast_one_to_all(words).tolist()
    return int(high) << 32 | int(low)
