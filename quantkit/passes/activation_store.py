"""Activations of samples: in memory and on a GPU up to budgets, beyond them in files."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quantkit.formats.output.destination import scratch_errors

# Bytes that are read or written at a time, because each needs a copy in memory.
_PIECE = 1 << 24
# Of the keys of batches' storages.
_BATCHES = "storages of batches"


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    path: Path
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Saved:
    """The copy of a batch's storage. The weak reference keeps the storage's id, so no other storage
    gets it.
    """

    nbytes: int
    storage: StorageWeakRef

    @property
    def is_gone(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


@dataclass
class _Batch:
    """What a stopped batch of samples holds.

    Attributes:
        memory_bytes, gpu_bytes: of its storages that are where they were.
        moved: its storages that have no memory.
        saved: the copies of storages in the store; those that are not moved may have one too.
        has_run: whether it has run since it stopped: only then it has lost storages.
    """

    memory_bytes: int = 0
    gpu_bytes: int = 0
    moved: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    saved: dict[int, _Saved] = field(default_factory=dict)
    has_run: bool = False


class ActivationStore:
    """Tensors by key, and the storages of stopped batches of samples, by the batch's number.

    A tensor that exceeds the memory's budget is written to a file. The storages of a batch are
    moved to files when all together would exceed the budget, and written again only if they have
    changed. Storages on a GPU have a budget of their own, beyond which they are moved to memory, as
    far as that has room, and to files.

    The folder of the files is made when first needed, and removed by `close`.

    Attributes:
        bytes_in_memory: of tensors in the host's memory.
        file_bytes: of tensors in files.
        written_bytes: all bytes that were written to files.
        spilled_bytes: the most bytes that were in files.
        peak_bytes: the most bytes that were in memory and on a GPU when a batch stopped.
    """

    def __init__(
        self, folder: Path | None = None, memory_bytes: int = 0, gpu_bytes: int = 0
    ) -> None:
        """
        Args:
            folder: None keeps everything where it is.
            memory_bytes: the budget of memory, of each of several processes.
            gpu_bytes: the budget on the GPU, for the storages of batches.
        """
        self._folder = folder
        self._memory_budget = memory_bytes
        self._gpu_budget = gpu_bytes
        self._tensors: dict[Hashable, Tensor] = {}
        self._files: dict[Hashable, _Stored] = {}
        self._reserved: dict[Hashable, int] = {}
        self._batches: dict[int, _Batch] = defaultdict(_Batch)
        # Files that were made so far, which have numbers as names.
        self._file_count = 0
        self.bytes_in_memory = 0
        self.file_bytes = 0
        self.written_bytes = 0
        self.spilled_bytes = 0
        self.peak_bytes = 0

    def reserve(self, owner: Hashable, nbytes: int) -> None:
        """Count memory that its owner uses outside of the store, in place of what it had before."""
        self._reserved[owner] = nbytes

    def has_room(self, nbytes: int) -> bool:
        """Check that memory has room for some more bytes."""
        if self._folder is None:
            return True
        used = self.bytes_in_memory + sum(self._reserved.values())
        used += sum(batch.memory_bytes for batch in self._batches.values())
        return used + nbytes <= self._memory_budget

    def put(self, key: Hashable, value: Tensor, *, to_file: bool = False) -> None:
        """Keep a tensor under a key that is not in use. A GPU's is copied to memory or to a file.

        Args:
            to_file: write it to a file even if memory has room.

        Raises:
            DestinationError: if it cannot be written.
        """
        if self._folder is None:
            self._keep(key, value)
            return
        stays = not to_file and self.has_room(value.nbytes)
        if not _is_on_host(value):
            value = _to_host(value, stays=stays)
        if stays:
            self._keep(key, value)
        else:
            self._write_new(key, value, self._folder)

    def take(self, key: Hashable) -> Tensor:
        """Remove a tensor and return it."""
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

    def hold_batch(
        self,
        number: int,
        storages: Mapping[int, torch.UntypedStorage],
        written: Collection[int],
        find_shared: Callable[[], Collection[int]],
    ) -> None:
        """Count the storages of a batch that has stopped, by id, and move them where there is room
        if they exceed the budgets.

        Args:
            written: the ids of storages that have changed since a batch stopped last.
            find_shared: returns the ids of storages that are not moved.

        Raises:
            DestinationError: if they cannot be written.
        """
        self._remove_outdated_copies(written)
        batch = self._batches[number]
        batch.has_run = False
        on_gpu: dict[int, torch.UntypedStorage] = {}
        in_memory: dict[int, torch.UntypedStorage] = {}
        for name, storage in storages.items():
            # A meta tensor's storage has a size, but no memory.
            if storage.device.type == "cuda":
                on_gpu[name] = storage
            elif storage.device.type == "cpu":
                in_memory[name] = storage
        gpu_bytes = sum(storage.nbytes() for storage in on_gpu.values())
        memory_bytes = sum(storage.nbytes() for storage in in_memory.values())
        leaving: dict[int, torch.UntypedStorage] = {}
        if self._folder is not None:
            if self._count_gpu_bytes() + gpu_bytes > self._gpu_budget:
                leaving |= on_gpu
                gpu_bytes = 0
            if not self.has_room(memory_bytes):
                leaving |= in_memory
                memory_bytes = 0
        batch.gpu_bytes = gpu_bytes
        batch.memory_bytes = memory_bytes
        if leaving:
            # Called only here, because it visits modules of the model.
            shared = find_shared()
            moved: dict[int, torch.UntypedStorage] = {}
            for name, storage in leaving.items():
                if name not in shared and storage.nbytes():
                    moved[name] = storage
            self._move(number, moved)
        resident = self.bytes_in_memory + self._count_gpu_bytes()
        resident += sum(batch.memory_bytes for batch in self._batches.values())
        self.peak_bytes = max(self.peak_bytes, resident)

    def resume_batch(self, number: int) -> None:
        """Read the storages of a batch back to where they were, before it continues."""
        batch = self._batches[number]
        batch.has_run = True
        batch.memory_bytes = 0
        batch.gpu_bytes = 0
        moved = batch.moved
        batch.moved = {}
        for name, storage in moved.items():
            storage.resize_(batch.saved[name].nbytes)
            self._read_into((_BATCHES, number, name), _view_bytes(storage))

    def release_batches(self) -> None:
        """Free what the store has of batches, which do not continue."""
        for number, batch in self._batches.items():
            for name in batch.saved:
                self.remove((_BATCHES, number, name))
        self._batches.clear()

    def _count_gpu_bytes(self) -> int:
        return sum(batch.gpu_bytes for batch in self._batches.values())

    def _move(self, number: int, moved: dict[int, torch.UntypedStorage]) -> None:
        """Copy storages of a batch, unless they have a copy, and free their memory."""
        batch = self._batches[number]
        for name, storage in moved.items():
            if name not in batch.saved:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                # What leaves memory cannot stay there as a copy.
                is_in_memory = storage.device.type == "cpu"
                self.put((_BATCHES, number, name), _view_bytes(storage), to_file=is_in_memory)
                batch.saved[name] = _Saved(storage.nbytes(), reference)
        batch.moved = moved
        # Only after all are copied, so that an error leaves the batch as it was.
        for storage in moved.values():
            storage.resize_(0)

    def _remove_outdated_copies(self, written: Collection[int]) -> None:
        """Remove the copies of storages that have changed or are gone."""
        for number, batch in self._batches.items():
            # Of all batches: the batch that ran may have written to a tensor of another one.
            outdated = [name for name in written if name in batch.saved]
            if batch.has_run:
                outdated = [
                    name for name, saved in batch.saved.items() if name in written or saved.is_gone
                ]
            for name in outdated:
                del batch.saved[name]
                self.remove((_BATCHES, number, name))

    def close(self) -> None:
        """Free everything and remove the folder."""
        self._tensors.clear()
        self._files.clear()
        self._reserved.clear()
        self._batches.clear()
        self.bytes_in_memory = 0
        self.file_bytes = 0
        # A folder that was there before is not the store's.
        if self._file_count and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._file_count = 0

    def _read_into(self, key: Hashable, target: Tensor) -> None:
        """Copy a tensor of bytes [N] uint8, which stays in the store, to another one."""
        value = self._tensors.get(key)
        if value is not None:
            target.copy_(value)
            return
        with open(self._files[key].path, "rb") as file:
            for piece in torch.split(target, _PIECE):
                piece.copy_(torch.from_numpy(np.fromfile(file, np.uint8, len(piece))))

    def _keep(self, key: Hashable, value: Tensor) -> None:
        self._tensors[key] = value
        if _is_on_host(value):
            self.bytes_in_memory += value.nbytes

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
        self.spilled_bytes = max(self.spilled_bytes, self.file_bytes)


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a storage's bytes, which share its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
