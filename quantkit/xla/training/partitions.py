"""Sharding in two dimensions for training: a mesh of devices ("data", "model"), and the sharding of
each array along these axes.

The shardings are those of PyTorch/XLA's article on Llama 2 (2023). The axis "data" divides samples,
and also weights, which are gathered along it before they are used. The axis "model" divides
features: no weight is ever gathered along it. Slices that are connected by the network of a data
center are an axis before these, `SLICES`. It divides only samples, so slices exchange only
gradients of scales.
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
"""The axis of the mesh for each axis of an array; None if it is not divided."""


def parameter_spec(parameter: Parameter) -> Spec:
    """Choose the sharding of a tensor: the hidden size along data and the other axis along model,
    in attention the opposite. Vectors are replicated.
    """
    if len(parameter.shape) < 2:
        return (None,)
    if parameter.role in _ATTENTION:
        hidden = MODEL
        other = DATA
    else:
        hidden = DATA
        other = MODEL
    spec: list[str] = []
    for dim in parameter.dims:
        spec.append(hidden if dim == "hidden" else other)
    return tuple(spec)


@dataclass(frozen=True)
class DeviceMesh:
    """Devices in two dimensions, or three with slices, and the shardings of arrays on them."""

    mesh: Mesh

    @classmethod
    def of(cls, devices: Sequence[Any], shape: tuple[int, int], slices: int = 1) -> DeviceMesh:
        """Make a mesh of a shape for each slice, of neighbouring chips if devices have coordinates.

        Raises:
            RequestError: if there are fewer devices.
        """
        count = slices * math.prod(shape)
        if len(devices) < count:
            raise make_device_count_error(devices, count)
        # Only TPU devices have the index of their slice. The sort is stable.
        by_slice = sorted(devices, key=lambda device: getattr(device, "slice_index", None) or 0)
        slice_size = math.prod(shape)
        slice_meshes: list[np.ndarray[Any, Any]] = []
        for start in range(0, count, slice_size):
            slice_devices = by_slice[start : start + slice_size]
            # Splitting allows meshes that divide a physical axis, such as 4x16 on 8x8 chips.
            slice_mesh = mesh_utils.create_device_mesh(
                shape, slice_devices, allow_split_physical_axes=True
            )
            slice_meshes.append(slice_mesh)
        return cls(Mesh(np.stack(slice_meshes), (SLICES, DATA, MODEL)))

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the axes that divide samples."""
        return SLICES, DATA

    @cached_property
    def sample_shards(self) -> int:
        """Return the number of parts into which samples are divided."""
        return int(self.mesh.shape[SLICES] * self.mesh.shape[DATA])

    def size(self, axis: str | None) -> int:
        """Return the size of an axis of the mesh; 1 for None."""
        if axis is None:
            return 1
        return int(self.mesh.shape[axis])

    def fitting(self, spec: Spec, shape: Sequence[int]) -> PartitionSpec:
        """Remove the axes of a spec that do not divide an array's shape. Leading axes of the array
        that the spec does not have are not divided.
        """
        spec = (None,) * (len(shape) - len(spec)) + tuple(spec)
        fitting_axes: list[Any] = []
        for axis, size in zip(spec, shape, strict=True):
            fitting_axes.append(axis if size % self._parts(axis) == 0 else None)
        return PartitionSpec(*fitting_axes)

    def sharding(self, spec: Spec, shape: Sequence[int]) -> NamedSharding:
        """Make the sharding of an array with a shape."""
        return NamedSharding(self.mesh, self.fitting(spec, shape))

    def constrain(self, array: jax.Array, *spec: Any) -> jax.Array:
        """Constrain the sharding of an array within a program."""
        return jax.lax.with_sharding_constraint(array, self.sharding(spec, array.shape))

    def require_divides(self, batch: int) -> None:
        """Raise a `RequestError` if the samples cannot be divided evenly."""
        if batch % self.sample_shards:
            raise RequestError(
                "the samples of a step can't be divided among the devices",
                found=batch,
                expected=f"a multiple of {self.sample_shards}",
            )

    def put(self, array: Any) -> jax.Array:
        """Copy a replicated array to all devices."""
        return jax.device_put(array, self.sharding((), np.shape(array)))

    def abstract(self, shape: tuple[int, ...], dtype: Any, spec: Spec) -> jax.ShapeDtypeStruct:
        """Describe an array without its values."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(spec, shape))

    def _parts(self, axis: Any) -> int:
        # An axis of an array may be divided along several axes of the mesh, as samples are.
        axes = axis if isinstance(axis, tuple) else (axis,)
        return math.prod(self.size(name) for name in axes)
