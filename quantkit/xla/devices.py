"""The devices that there are, as a mesh; several hosts as one; compiled programs kept on disk."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from quantkit.errors import RequestError
from quantkit.kernels.build import cache_folder
from quantkit.xla.products import AXIS


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
