"""Make a mesh of the devices that JAX finds, and load a checkpoint's tensors as arrays over it.

Each array is [N, ...], with one shard for each of the N devices. Replicated tensors occur N times.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from quantkit.architectures.topology import parameters
from quantkit.base.progress import Progress, silent
from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint
from quantkit.kernels.build import cache_folder
from quantkit.model.rope import Rotary
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec
from quantkit.xla.model import AXIS
from quantkit.xla.split import DeviceSplit, Leaf

SHARDED = PartitionSpec(AXIS)


def find_devices(*, multi_host: bool = False) -> list[Any]:
    """Find the devices of JAX; see `device_mesh`. Compiled programs are cached for later runs.

    Raises:
        RequestError: if there are none.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    # Cache all programs: by default, JAX caches only those that took a second to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        if multi_host:
            jax.distributed.initialize(
                num_processes=_number("JAX_NUM_PROCESSES"), process_id=_number("JAX_PROCESS_ID")
            )
        return list(jax.devices())
    except (RuntimeError, ValueError) as error:
        raise RequestError(f"JAX finds no devices: {error}") from error


def make_device_count_error(devices: Sequence[Any], count: int) -> RequestError:
    """Make the error for more devices than there are."""
    # Tests and trials use virtual devices of the CPU.
    flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} creates virtual devices"
    return RequestError(
        "too few devices",
        found=f"{len(devices)} of kind {devices[0].device_kind}",
        expected=count,
        hint=flag if devices[0].platform == "cpu" else None,
    )


def device_mesh(count: int | None, *, multi_host: bool = False) -> Mesh:
    """Make a one-dimensional mesh of devices.

    Args:
        count: how many; None takes all.
        multi_host: whether other processes, each started in the same way, also have devices. JAX
            finds them on a TPU pod and under Slurm; elsewhere they are described by
            ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``.

    Raises:
        RequestError: if there are fewer devices, or a host's devices would not be used.
    """
    devices = find_devices(multi_host=multi_host)
    count = len(devices) if count is None else count
    if count < 1:
        raise RequestError("devices must be at least 1", found=count)
    if count > len(devices):
        raise make_device_count_error(devices, count)
    if multi_host and count < len(devices):
        raise RequestError(
            "with several hosts, all devices must be used", found=count, expected=len(devices)
        )
    # Only with all devices can JAX place neighbours of the mesh on neighbouring chips.
    if count < len(devices):
        return Mesh(np.array(devices[:count]), (AXIS,))
    return Mesh(mesh_utils.create_device_mesh((count,), devices), (AXIS,))


def _number(variable: str) -> int | None:
    value = os.environ.get(variable)
    if value is None:
        return None
    return int(value)


def load_state(
    checkpoint: Checkpoint,
    split: DeviceSplit,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    progress: Progress = silent,
) -> dict[str, jax.Array]:
    """Read a checkpoint, each tensor once, and copy its shards to the devices of this process;
    floats become `dtype`.
    """
    state: dict[str, jax.Array] = {}
    ranks: list[int] = []
    for rank, device in enumerate(mesh.devices.flat):
        if device.process_index == jax.process_index():
            ranks.append(rank)
    all_parameters = parameters(split.config)
    for index, parameter in enumerate(all_parameters):
        progress("load", index, len(all_parameters), "tensors")
        value = _cast(checkpoint.load(parameter.name), dtype)
        leaves_by_rank = [split.leaves(parameter, value, rank) for rank in ranks]
        # The arrays of one name, from all ranks.
        for leaves in zip(*leaves_by_rank, strict=True):
            shards = dict(zip(ranks, leaves, strict=True))
            state[leaves[0].name] = _make_sharded_array(mesh, shards)
        # Free the host's memory before the next tensor is loaded.
        del value, leaves_by_rank
    progress("load", len(all_parameters), len(all_parameters), "tensors")
    for leaf in _make_rotary_leaves(split):
        state[leaf.name] = _make_sharded_array(mesh, dict.fromkeys(ranks, leaf))
    return state


def abstract_state(
    infos: Mapping[str, TensorSpec], split: DeviceSplit, mesh: Mesh, dtype: torch.dtype
) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of `load_state` without weights, from the specs of all tensors."""
    leaves = list(_make_rotary_leaves(split))
    for parameter in parameters(split.config):
        value = _cast(_make_meta_tensor(infos[parameter.name]), dtype)
        # The shards of all devices have the same shape.
        leaves += split.leaves(parameter, value, 0)
    result: dict[str, jax.ShapeDtypeStruct] = {}
    for leaf in leaves:
        result[leaf.name] = abstract(mesh, (mesh.size, *leaf.value.shape), _dtype(leaf))
    return result


def abstract(
    mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = SHARDED
) -> jax.ShapeDtypeStruct:
    """Describe an array over a mesh without its values."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def zeros(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Make zeros [N, ...] over a mesh."""
    # Compiled, so that each device makes its own shard and the host needs no memory.
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=NamedSharding(mesh, SHARDED))()


def jax_dtype(dtype: torch.dtype) -> Any:
    """Convert a dtype of torch to one of JAX."""
    return jnp.dtype(DType.of(dtype).value)


def _make_rotary_leaves(split: DeviceSplit) -> list[Leaf]:
    """Make the buffers that are not tensors of the checkpoint: the rotary frequencies."""
    result: list[Leaf] = []
    for name, values in Rotary(split.config).named_buffers():
        result.append(Leaf(f"rotary.{name}", values))
    return result


def _cast(value: Tensor | QuantTensor, dtype: torch.dtype) -> Tensor | QuantTensor:
    if isinstance(value, Tensor):
        return value.to(dtype)
    return value


def _make_meta_tensor(info: TensorSpec) -> Tensor | QuantTensor:
    scheme = info.scheme
    if scheme is None:
        return torch.empty(info.shape, dtype=info.dtype.torch, device="meta")
    codes = torch.empty(info.shape, dtype=torch.uint8, device="meta")
    scale = torch.empty(
        info.shape[0], scheme.groups(info.shape[1]), dtype=info.dtype.torch, device="meta"
    )
    return QuantTensor(codes, scale, None if scheme.symmetric else scale.to(torch.uint8), scheme)


def _dtype(leaf: Leaf) -> Any:
    if leaf.nibbles:
        return jnp.int4
    return jax_dtype(leaf.value.dtype)


def _make_sharded_array(mesh: Mesh, leaves: Mapping[int, Leaf]) -> jax.Array:
    """Make an array from the shards of this process's ranks."""
    shape = (mesh.size, *next(iter(leaves.values())).value.shape)

    def shard(index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        # JAX asks only for the shards of this process. A single device has `slice(None)`.
        return _numpy(leaves[index[0].start or 0])[None]

    return jax.make_array_from_callback(shape, NamedSharding(mesh, SHARDED), shard)


def _numpy(leaf: Leaf) -> np.ndarray[Any, Any]:
    value = leaf.value.contiguous()
    # torch cannot convert bfloat16 to NumPy, which has no such type of its own.
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array = value.numpy()
    if leaf.nibbles:
        return array.astype(ml_dtypes.int4)
    return array
