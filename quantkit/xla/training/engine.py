"""Training on the devices that JAX finds, over a mesh."""

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
from quantkit.xla.weights import found_devices


class OnDevices:
    """The `Engine` of XLA: the whole model is on the devices, and so are factors and moments."""

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
            model: gets the trained values with `fetch`.
            quantized: the model before.
            reference: the float model.

        Raises:
            RequestError: if the mesh does not divide the samples of a step, or the devices have too
                little memory.
            UnsupportedError: for a model that XLA does not train.
        """
        mesh.require_divides(min(samples.batch, samples.training))
        self._model = model
        self._samples = samples
        self._schedule = schedule
        self._mesh = mesh
        self._trained = select_trained_leaves(quantized, model.names_trained)
        decoder = MeshDecoder(quantized.config, schemes(quantized), mesh, product_dtype())
        self._programs = TrainingPrograms(decoder, rates(quantized, self._trained))
        self.moments = {
            name + end: torch.zeros_like(factor)
            for name, factor in model.factors.items()
            for end in (FIRST, SECOND)
        }
        self._values: Trained
        with enough_memory(None):
            self._arrays = load_arrays(quantized, mesh)
            if reference.config.tied_embeddings:
                name = EMBEDDING
            else:
                name = HEAD
            self._arrays[TARGET_HEAD] = load_arrays(reference, mesh, only=name)[name]
        self.put()

    def step(self, step: int, numbers: Tensor) -> float:
        pace = Pace(*map(np.float32, (self._schedule.share(step), *corrections(step))))
        with enough_memory(None):
            self._values, loss = self._programs.step(
                self._arrays, self._values, *self._inputs(numbers), pace
            )
            return float(loss)

    def loss(self, numbers: Tensor) -> float:
        size = _multiple(self._samples.batch, self._mesh.sample_shards)
        total = 0.0
        with enough_memory(None):
            for some in torch.split(numbers, size):
                inputs = self._inputs(_pad_samples(some, size))
                found = np.asarray(
                    self._programs.losses(self._arrays, self._values.factors, *inputs)
                )
                total += float(found[: len(some)].sum(dtype=np.float64))
        return total / (len(numbers) * self._samples.tokens.shape[1])

    def fetch(self) -> None:
        fetch(self._trained, self._values, self._model.factors, self.moments)

    def put(self) -> None:
        self._values = put(self._trained, self._mesh, self._model.factors, self.moments)

    def _inputs(self, numbers: Tensor) -> tuple[Any, Any]:
        samples = self._samples
        targets = samples.targets(numbers).numpy()
        spec = self._mesh.samples, None, MODEL
        return _put_tokens(samples.tokens[numbers], self._mesh), jax.device_put(
            targets, self._mesh.sharding(spec, targets.shape)
        )


def mesh_of(shape: tuple[int, int] | None) -> DeviceMesh:
    """Return the mesh of the devices that JAX finds; without a shape, all of them share the model.

    Raises:
        RequestError: if there are fewer devices.
    """
    devices = found_devices()
    return DeviceMesh.of(devices, shape or (1, len(devices)))


def float_states(reference: Checkpoint, mesh: DeviceMesh, batch: int) -> Hidden:
    """Runs a float model on the devices, on a number of samples at a time.

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
        found = []
        for start in range(0, len(tokens), size):
            progress("float model", start, len(tokens), "samples")
            own = torch.arange(start, min(start + size, len(tokens)))
            with enough_memory(None):
                states = np.asarray(
                    program(arrays, _put_tokens(tokens[_pad_samples(own, size)], mesh))
                )
            found.append(torch.from_numpy(states[: len(own)].copy()))
        return torch.cat(found)

    return hidden


def product_dtype() -> Any:
    """Of products: a TPU multiplies bfloat16, and takes six passes for float32."""
    if jax.default_backend() == "tpu":
        return jnp.bfloat16
    return jnp.float32


def _put_tokens(tokens: Tensor, mesh: DeviceMesh) -> jax.Array:
    found = tokens.to(torch.int32).numpy()
    return jax.device_put(found, mesh.sharding((mesh.samples, None), found.shape))


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _pad_samples(numbers: Tensor, size: int) -> Tensor:
    """Return a number of samples, the last one several times if there are fewer: another number
    would be compiled anew.
    """
    return torch.cat([numbers, numbers[-1:].expand(size - len(numbers))])
