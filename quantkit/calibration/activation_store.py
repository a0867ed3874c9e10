"""Calibration activations: on a GPU and in memory up to budgets, beyond them in files."""

from __future__ import annotations

import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from quantkit.formats.output.destination import scratch_errors


class ActivationStore:
    """Tensors by key. Tensors from a GPU stay there within its budget; those that exceed the
    memory's budget are written to a folder.

    The folder is made when first needed, and removed by `close`.
    """

    def __init__(self, folder: Path, memory_bytes: int, gpu_bytes: int = 0) -> None:
        """A folder that a killed run has left is removed. The budgets are of each of several
        processes: in memory, and on the GPU that tensors come from.
        """
        self._folder = folder
        self._free = {True: memory_bytes, False: gpu_bytes}  # by whether it is on the host
        self._tensors: dict[Hashable, Tensor] = {}
        self._files: dict[Hashable, tuple[Path, torch.Size, torch.dtype]] = {}
        self._count = 0  # of files written so far
        shutil.rmtree(folder, ignore_errors=True)

    @property
    def bytes_in_memory(self) -> int:
        """Count the bytes of tensors in the host's memory."""
        return sum(value.nbytes for value in self._tensors.values() if _on_host(value))

    def put(self, key: Hashable, value: Tensor) -> None:
        """Keep a tensor under a key that is not in use; if it does not fit in memory and cannot be
        written, a `DestinationError` is raised.
        """
        if not _on_host(value) and value.nbytes > self._free[False]:
            value = _to_host(value, stays=value.nbytes <= self._free[True])
        if value.nbytes <= self._free[_on_host(value)]:
            self._free[_on_host(value)] -= value.nbytes
            self._tensors[key] = value
            return
        path = self._folder / str(self._count)
        with scratch_errors(self._folder):
            if not self._count:
                # Fails if it exists: it might be a link to another place.
                self._folder.mkdir(parents=True)
            self._count += 1
            _write(path, value)
        self._files[key] = path, value.shape, value.dtype

    def take(self, key: Hashable) -> Tensor:
        """Remove a tensor and return it, on the device where it was kept."""
        value = self.get(key)
        if self._tensors.pop(key, None) is not None:
            self._free[_on_host(value)] += value.nbytes
        else:
            self._files.pop(key)[0].unlink()
        return value

    def get(self, key: Hashable) -> Tensor:
        """Return a tensor, which stays in the store; what is changed in it may stay unchanged there
        until `update`.
        """
        if (value := self._tensors.get(key)) is not None:
            return value
        path, shape, dtype = self._files[key]
        return torch.from_numpy(np.fromfile(path, dtype=np.uint8)).view(dtype).view(shape)

    def update(self, key: Hashable, value: Tensor) -> None:
        """Replace a tensor by another of its shape and type, on the same device."""
        if key in self._tensors:
            self._tensors[key] = value
        else:
            with scratch_errors(self._folder):
                _write(self._files[key][0], value)

    def rows(self, key: Hashable, numbers: Tensor) -> Tensor:
        """Some rows [N, D] of a float32 tensor [..., D], which stays in the store."""
        if (value := self._tensors.get(key)) is not None:
            return value.flatten(0, -2)[numbers.to(value.device)]
        return torch.from_numpy(self._map_rows(key, "r")[numbers.numpy()])

    def add_rows(self, key: Hashable, numbers: Tensor, values: Tensor) -> None:
        """Add values [N, D] to rows of a float32 tensor [..., D], each listed once."""
        if (value := self._tensors.get(key)) is not None:
            value.view(-1, value.shape[-1]).index_add_(
                0, numbers.to(value.device), values.to(value.device)
            )
        else:
            self._map_rows(key, "r+")[numbers.numpy()] += values.cpu().numpy()

    def _map_rows(
        self, key: Hashable, mode: Literal["r", "r+"]
    ) -> np.memmap[Any, np.dtype[np.float32]]:
        """Return the rows of a float32 tensor in a file."""
        path, shape, _ = self._files[key]
        return np.memmap(path, np.float32, mode, shape=(shape[:-1].numel(), shape[-1]))

    def close(self) -> None:
        """Free all tensors and remove the folder."""
        self._tensors.clear()
        self._files.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def _to_host(value: Tensor, *, stays: bool) -> Tensor:
    """Return a GPU's tensor in the host's memory; in pinned pages if it stays there, as a GPU reads
    these fastest.
    """
    if not stays or value.device.type != "cuda":
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)


def _write(path: Path, value: Tensor) -> None:
    with path.open("wb") as file:
        # Numpy's own way misses a full disk.
        file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
