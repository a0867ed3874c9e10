"""Sharding in two dimensions for training: a mesh of devices ("data", "model"), and which axis of
each array lies along which axis of the mesh.

The tables are those of PyTorch/XLA's article on Llama 2 (2023). The axis "data" divides samples,
and the weights among the devices that have other samples; a weight is gathered along it before it
is used. The axis "model" divides features: no weight is ever gathered along it. Slices of a pod
that are connected by the network of a data center are an axis before these, `SLICES`: it divides
samples only, so what slices exchange is gradients of scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quantkit.architectures.topology import Parameter
from quantkit.errors import RequestError
from quantkit.xla.weights import make_device_count_error

SLICES = "slices"
DATA = "data"
MODEL = "model"
_ATTENTION = ("attention.q", "attention.k", "attention.v", "attention.output")

Spec = tuple[Any, ...]
"""The axis of the mesh for each axis of an array; None where it is not divided."""


def parameter_spec(parameter: Parameter) -> Spec:
    """Return how a tensor of a model lies on the mesh: the hidden size by data and the other one by
    model, in attention the opposite; vectors are whole everywhere.
    """
    if len(parameter.shape) < 2:
        return (None,)
    if parameter.role in _ATTENTION:
        hidden = MODEL
    else:
        hidden = DATA
    other = DATA if hidden == MODEL else MODEL
    return tuple(hidden if dim == "hidden" else other for dim in parameter.dims)


@dataclass(frozen=True)
class DeviceMesh:
    """Devices in two dimensions, or three with slices, and where arrays lie on them."""

    mesh: Mesh

    @classmethod
    def of(cls, devices: Sequence[Any], shape: tuple[int, int], slices: int = 1) -> DeviceMesh:
        """Return a mesh of a shape for each slice, of neighbours where devices have places.

        Raises:
            RequestError: if there are fewer devices.
        """
        count = slices * math.prod(shape)
        if len(devices) < count:
            raise make_device_count_error(devices, count)
        own = sorted(devices, key=lambda one: getattr(one, "slice_index", None) or 0)[:count]
        each = []
        for start in range(0, count, math.prod(shape)):
            each.append(own[start : start + math.prod(shape)])
        placed = []
        for some in each:
            placed.append(
                mesh_utils.create_device_mesh(shape, some, allow_split_physical_axes=True)
            )
        return cls(Mesh(np.stack(placed), (SLICES, DATA, MODEL)))

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the axes that divide samples."""
        return SLICES, DATA

    @cached_property
    def sample_shards(self) -> int:
        """Into how many parts samples are divided."""
        return int(self.mesh.shape[SLICES] * self.mesh.shape[DATA])

    def size(self, axis: str | None) -> int:
        """Of an axis of the mesh; 1 for none."""
        if axis is None:
            return 1
        return int(self.mesh.shape[axis])

    def fitting(self, spec: Spec, shape: Sequence[int]) -> PartitionSpec:
        """Return a spec for an array, without the axes that do not divide its shape; leading axes
        that the spec does not have are not divided.
        """
        spec = (None,) * (len(shape) - len(spec)) + tuple(spec)
        return PartitionSpec(
            *(
                axis if size % self._parts(axis) == 0 else None
                for axis, size in zip(spec, shape, strict=True)
            )
        )

    def sharding(self, spec: Spec, shape: Sequence[int]) -> NamedSharding:
        """Return where an array of a shape lies."""
        return NamedSharding(self.mesh, self.fitting(spec, shape))

    def constrain(self, array: jax.Array, *spec: Any) -> jax.Array:
        """Let an array lie so, in a program."""
        return jax.lax.with_sharding_constraint(array, self.sharding(spec, array.shape))

    def require_divides(self, batch: int) -> None:
        """Raise a `RequestError` unless samples can be divided."""
        if batch % self.sample_shards:
            raise RequestError(
                "the samples of a step can't be divided among the devices",
                found=batch,
                expected=f"a multiple of {self.sample_shards}",
            )

    def put(self, array: Any) -> jax.Array:
        """Return an array that is whole on all devices."""
        return jax.device_put(array, self.sharding((), np.shape(array)))

    def abstract(self, shape: tuple[int, ...], dtype: Any, spec: Spec) -> jax.ShapeDtypeStruct:
        """Return an array that is not there."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(spec, shape))

    def _parts(self, axis: Any) -> int:
        return math.prod(self.size(one) for one in (axis if isinstance(axis, tuple) else (axis,)))
