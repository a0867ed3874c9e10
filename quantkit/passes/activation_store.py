"""Activations of samples: on a GPU and in memory up to budgets, beyond them in files."""

from __future__ import annotations

import shutil
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantkit.formats.output.destination import scratch_errors

# Bytes that are read or written at a time, because each needs a copy in memory.
_PIECE = 1 << 24


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class ActivationStore:
    """Tensors by key. Tensors from a GPU stay there within its budget; those that exceed the
    memory's budget are written to a folder.

    The folder is made when first needed, and removed by `close`.

    Attributes:
        bytes_in_memory: of tensors in the host's memory.
        file_bytes: of tensors in files.
        written_bytes: all bytes that were written to files.
    """

    def __init__(
        self, folder: Path | None = None, memory_bytes: int = 0, gpu_bytes: int = 0
    ) -> None:
        """
        Args:
            folder: None keeps all tensors where they are.
            memory_bytes: the budget of memory, of each of several processes.
            gpu_bytes: the budget on the GPU that tensors come from.
        """
        self._folder = folder
        self._memory_budget = memory_bytes
        self._gpu_budget = gpu_bytes
        self._tensors: dict[Hashable, Tensor] = {}
        self._files: dict[Hashable, _Stored] = {}
        self._reserved: dict[Hashable, int] = {}
        # Files that were made so far, which have numbers as names.
        self._file_count = 0
        self._bytes_on_gpu = 0
        self.bytes_in_memory = 0
        self.file_bytes = 0
        self.written_bytes = 0

    def reserve(self, owner: Hashable, nbytes: int) -> None:
        """Count memory that its owner uses outside of the store, in place of what it had before."""
        self._reserved[owner] = nbytes

    def has_room(self, nbytes: int) -> bool:
        """Check that memory has room for some more bytes."""
        if self._folder is None:
            return True
        used = self.bytes_in_memory + sum(self._reserved.values())
        return used + nbytes <= self._memory_budget

    def put(self, key: Hashable, value: Tensor, *, to_file: bool = False) -> None:
        """Keep a tensor under a key that is not in use.

        Args:
            to_file: write it to a file even if memory has room.

        Raises:
            DestinationError: if it cannot be written.
        """
        if self._folder is None:
            self._keep(key, value)
            return
        if not _is_on_host(value):
            if self._bytes_on_gpu + value.nbytes <= self._gpu_budget:
                self._keep(key, value)
                return
            value = _to_host(value, stays=self.has_room(value.nbytes) and not to_file)
        if self.has_room(value.nbytes) and not to_file:
            self._keep(key, value)
        else:
            self._write_new(key, value, self._folder)

    def take(self, key: Hashable) -> Tensor:
        """Remove a tensor and return it, on the device where it was kept."""
        value = self.get(key)
        self.remove(key)
        return value

    def get(self, key: Hashable) -> Tensor:
        """Return a tensor, which stays in the store; what is changed in it may stay unchanged there
        until `update`.
        """
        value = self._tensors.get(key)
        if value is not None:
            return value
        stored = self._files[key]
        values = torch.from_numpy(np.fromfile(stored.path, dtype=np.uint8))
        return values.view(stored.dtype).view(stored.shape)

    def read_into(self, key: Hashable, target: Tensor) -> None:
        """Copy the bytes of a tensor, which stays in the store, to a tensor of bytes [N] uint8."""
        value = self._tensors.get(key)
        if value is not None:
            target.copy_(value)
            return
        with open(self._files[key].path, "rb") as file:
            for piece in torch.split(target, _PIECE):
                piece.copy_(torch.from_numpy(np.fromfile(file, np.uint8, len(piece))))

    def update(self, key: Hashable, value: Tensor) -> None:
        """Replace a tensor by another of its shape and type, on the same device."""
        if key in self._tensors:
            self._tensors[key] = value
            return
        assert self._folder is not None
        with scratch_errors(self._folder):
            _write(self._files[key].path, value)

    def remove(self, key: Hashable) -> None:
        """Remove a tensor."""
        value = self._tensors.pop(key, None)
        if value is None:
            stored = self._files.pop(key)
            self.file_bytes -= stored.nbytes
            stored.path.unlink()
        elif _is_on_host(value):
            self.bytes_in_memory -= value.nbytes
        else:
            self._bytes_on_gpu -= value.nbytes

    def close(self) -> None:
        """Free all tensors and remove the folder."""
        self._tensors.clear()
        self._files.clear()
        self._reserved.clear()
        self._bytes_on_gpu = 0
        self.bytes_in_memory = 0
        self.file_bytes = 0
        # A folder that was there before is not the store's.
        if self._file_count and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._file_count = 0

    def _keep(self, key: Hashable, value: Tensor) -> None:
        self._tensors[key] = value
        if _is_on_host(value):
            self.bytes_in_memory += value.nbytes
        else:
            self._bytes_on_gpu += value.nbytes

    def _write_new(self, key: Hashable, value: Tensor, folder: Path) -> None:
        """Write a tensor to a file of its own."""
        with scratch_errors(folder):
            if not self._file_count:
                # Fails if it exists: it might be a link to another place.
                folder.mkdir(parents=True)
            self._file_count += 1
            path = folder / str(self._file_count)
            _write(path, value)
        self._files[key] = _Stored(path, value.shape, value.dtype)
        self.file_bytes += value.nbytes
        self.written_bytes += value.nbytes


def _is_on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def _to_host(value: Tensor, *, stays: bool) -> Tensor:
    """Return a GPU's tensor in the host's memory; in pinned pages if it stays there, as a GPU reads
    these fastest.
    """
    if not stays or value.device.type != "cuda":
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)


def _write(path: Path, value: Tensor) -> None:
    # Numpy's own way to write misses a full disk.
    with open(path, "wb") as file:
        for piece in torch.split(value.contiguous().flatten().view(torch.uint8), _PIECE):
            # The memory of tensors that numpy sees cannot be freed early, so it gets a copy.
            file.write(piece.clone().numpy().data)
