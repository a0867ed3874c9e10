"""A model over the devices that JAX finds, and generation with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Unpack

import jax
import numpy as np
import torch
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from quantkit.errors import RequestError
from quantkit.formats.checkpoint import Checkpoint, schemes
from quantkit.kernels.build import cache_folder
from quantkit.progress import Progress, silent
from quantkit.runtime.generate import new_tokens
from quantkit.runtime.request import MAX_NEW_TOKENS, TokenIds, checked_request, prompt_ids
from quantkit.runtime.sampling_params import SamplingOptions
from quantkit.tensors.dtypes import DType
from quantkit.xla.batch import XlaBatch
from quantkit.xla.model import sharded_decoder
from quantkit.xla.products import AXIS
from quantkit.xla.programs import ShardedModel
from quantkit.xla.split import DeviceSplit
from quantkit.xla.weights import load_state


class XlaModel(ShardedModel):
    """A model on devices that generates."""

    def runner(self, slots: int) -> XlaBatch:
        """What `quantkit.generate_batch` runs requests with, several sequences at once."""
        return XlaBatch(self, slots)

    def generate(
        self, ids: TokenIds, *, max_new_tokens: int = MAX_NEW_TOKENS, **sampling: Unpack[SamplingOptions]
    ) -> Iterator[int]:
        """What `quantkit.generate` does. The same seed draws other tokens than there.

        Raises:
            RequestError, NonFiniteError: as there.
        """
        request = checked_request(self.config, prompt_ids(ids), max_new_tokens, sampling)
        runner = self.runner(1)
        runner.require(request)
        return new_tokens(runner, request)


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
