"""Train on the devices that JAX finds, over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from quantkit.base.memory import enough_memory
from quantkit.base.progress import Progress
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.training.optimizer import FIRST, SECOND, Schedule, corrections
from quantkit.training.trained import TrainedCheckpoint
from quantkit.training.training import Hidden, Samples
from quantkit.xla.training.arrays import load_arrays
from quantkit.xla.training.model import EMBEDDING, MeshDecoder
from quantkit.xla.training.partitions import MODEL, DeviceMesh
from quantkit.xla.training.program import (
    HEAD,
    TARGET_HEAD,
    Pace,
    Trained,
    TrainingPrograms,
    hidden_program,
)
from quantkit.xla.training.state import fetch, put, rates, select_trained_leaves
from quantkit.xla.weights import find_devices


class OnDevices:
    """The `Engine` of XLA, with the model, factors and moments on the devices."""

    def __init__(
        self,
        model: TrainedCheckpoint,
        quantized: Checkpoint,
        reference: Checkpoint,
        samples: Samples,
        schedule: Schedule,
        mesh: DeviceMesh,
    ) -> None:
        """
        Args:
            model: receives the trained values in `fetch`.
            quantized: the model before training.
            reference: the float model.

        Raises:
            RequestError: if the mesh does not divide the samples of a step, or the devices have too
                little memory.
            UnsupportedError: for a model that XLA does not train.
        """
        # There may be fewer samples for training than a batch has.
        mesh.require_divides(min(samples.batch, samples.training))
        self._model = model
        self._samples = samples
        self._schedule = schedule
        self._mesh = mesh
        self._trained = select_trained_leaves(quantized, model.names_trained)
        decoder = MeshDecoder(quantized.config, schemes(quantized), mesh, product_dtype())
        self._programs = TrainingPrograms(decoder, rates(quantized, self._trained))
        self.moments: dict[str, Tensor] = {}
        for name, factor in model.factors.items():
            self.moments[name + FIRST] = torch.zeros_like(factor)
            self.moments[name + SECOND] = torch.zeros_like(factor)
        self._values: Trained
        with enough_memory(None):
            self._arrays = load_arrays(quantized, mesh)
            name = EMBEDDING if reference.config.tied_embeddings else HEAD
            # The targets are hidden states, so only the head of the float model is needed.
            self._arrays[TARGET_HEAD] = load_arrays(reference, mesh, only=name)[name]
        self.put()

    def step(self, step: int, numbers: Tensor) -> float:
        first, second = corrections(step)
        # Explicitly float32, as in the program that `plan refine` compiles.
        pace = Pace(np.float32(self._schedule.share(step)), np.float32(first), np.float32(second))
        with enough_memory(None):
            self._values, loss = self._programs.step(
                self._arrays, self._values, *self._inputs(numbers), pace
            )
            return float(loss)

    def loss(self, numbers: Tensor) -> float:
        size = _multiple(self._samples.batch, self._mesh.sample_shards)
        total = 0.0
        with enough_memory(None):
            for batch_numbers in torch.split(numbers, size):
                inputs = self._inputs(_pad_samples(batch_numbers, size))
                losses = self._programs.losses(self._arrays, self._values.factors, *inputs)
                # Without the padded samples.
                losses = np.asarray(losses)[: len(batch_numbers)]
                total += float(losses.sum(dtype=np.float64))
        return total / (len(numbers) * self._samples.tokens.shape[1])

    def fetch(self) -> None:
        fetch(self._trained, self._values, self._model.factors, self.moments)

    def put(self) -> None:
        self._values = put(self._trained, self._mesh, self._model.factors, self.moments)

    def _inputs(self, numbers: Tensor) -> tuple[Any, Any]:
        samples = self._samples
        targets = samples.targets(numbers).numpy()
        spec = self._mesh.samples, None, MODEL
        tokens = _put_tokens(samples.tokens[numbers], self._mesh)
        return tokens, jax.device_put(targets, self._mesh.sharding(spec, targets.shape))


def make_mesh(shape: tuple[int, int] | None) -> DeviceMesh:
    """Make a mesh of the devices that JAX finds; without a shape, all of them share the model.

    Raises:
        RequestError: if there are fewer devices.
    """
    devices = find_devices()
    return DeviceMesh.of(devices, shape or (1, len(devices)))


def make_hidden_function(reference: Checkpoint, mesh: DeviceMesh, batch: int) -> Hidden:
    """Return a function that runs a float model on the devices, on a batch of samples at a time.

    Raises:
        RequestError: if the devices have too little memory.
        UnsupportedError: for a model that XLA does not train.
    """
    decoder = MeshDecoder(reference.config, {}, mesh, product_dtype())
    size = _multiple(batch, mesh.sample_shards)
    program: Callable[..., Any] = hidden_program(decoder)
    with enough_memory(None):
        arrays = load_arrays(reference, mesh)

    def hidden(tokens: Tensor, progress: Progress) -> Tensor:
        parts: list[Tensor] = []
        for start in range(0, len(tokens), size):
            progress("float model", start, len(tokens), "samples")
            numbers = torch.arange(start, min(start + size, len(tokens)))
            inputs = tokens[_pad_samples(numbers, size)]
            with enough_memory(None):
                states = np.asarray(program(arrays, _put_tokens(inputs, mesh)))
            # A copy, because arrays of JAX are read-only.
            parts.append(torch.from_numpy(states[: len(numbers)].copy()))
        return torch.cat(parts)

    return hidden


def product_dtype() -> Any:
    """Choose the dtype of products: a TPU multiplies bfloat16, and needs six passes for float32."""
    if jax.default_backend() == "tpu":
        return jnp.bfloat16
    return jnp.float32


def _put_tokens(tokens: Tensor, mesh: DeviceMesh) -> jax.Array:
    # JAX has no 64-bit integers by default.
    token_array = tokens.to(torch.int32).numpy()
    return jax.device_put(token_array, mesh.sharding((mesh.samples, None), token_array.shape))


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _pad_samples(numbers: Tensor, size: int) -> Tensor:
    """Pad samples to a number by repeating the last one: XLA would compile another program for
    another number.
    """
    return torch.cat([numbers, numbers[-1:].expand(size - len(numbers))])
