"""Keep the tensors of stopped batches in memory up to a budget, and beyond it in files, while the
tensors have no memory.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quantkit.formats.output.destination import scratch_errors

# Bytes that are read or written at a time, because each needs a copy in memory.
_PIECE = 1 << 24


@dataclass
class _Saved:
    """A copy of a storage, in a file or in memory. The weak reference keeps the storage's id, so no
    other storage gets it.
    """

    copy: Path | Tensor
    nbytes: int
    storage: StorageWeakRef

    @property
    def is_gone(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]

    @property
    def bytes_in_memory(self) -> int:
        """Return the bytes of a copy in memory."""
        return self.nbytes if isinstance(self.copy, Tensor) else 0

    def remove(self) -> None:
        """Remove the copy's file."""
        if isinstance(self.copy, Path):
            self.copy.unlink()


class Spill:
    """Storages of batches. Each is moved to a file of its own when all together would exceed the
    budget of memory, and is written again only if it has changed. Storages on a GPU have a budget
    of their own, beyond which they are moved to memory, as far as that has room, and to files.

    Attributes:
        peak_bytes: the most bytes that were in memory, and on a GPU.
        spilled_bytes: the most bytes that were in files.
        written_bytes: all bytes that were written to files.
    """

    def __init__(
        self, folder: Path | None = None, memory_bytes: int = 0, gpu_bytes: int = 0
    ) -> None:
        """
        Args:
            folder: is made when first needed, and removed by `close`; without one, all is kept in
                memory.
            memory_bytes: the budget of memory.
            gpu_bytes: the budget of a GPU.
        """
        self._folder = folder
        self._budget = memory_bytes
        self._gpu_budget = gpu_bytes
        # By batch: of its storages where they are.
        self._bytes_in_memory: dict[int, int] = {}
        self._bytes_on_gpu: dict[int, int] = {}
        self._moved: dict[int, dict[int, torch.UntypedStorage]] = {}
        self._saved: dict[int, dict[int, _Saved]] = defaultdict(dict)
        # Of all copies. Counting them at each stop would take longer than moving a batch.
        self._copied_bytes = 0
        self._file_bytes = 0
        # Batches that have run since they were kept: only theirs have lost storages.
        self._running: set[int] = set()
        self._files = 0
        self.peak_bytes = 0
        self.spilled_bytes = 0
        self.written_bytes = 0

    def keep(
        self,
        batch: int,
        storages: Mapping[int, torch.UntypedStorage],
        written: Collection[int],
        shared: Callable[[], Collection[int]],
    ) -> None:
        """Count the storages of a batch that has stopped, by id, and move them where there is room
        if they exceed the budgets.

        Args:
            written: the ids of storages that have changed since a batch was kept last.
            shared: returns the ids of storages that are not moved.

        Raises:
            DestinationError: if they cannot be written.
        """
        self._remove_outdated_copies(written)
        self._running.discard(batch)
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
            if sum(self._bytes_on_gpu.values()) + gpu_bytes > self._gpu_budget:
                leaving |= on_gpu
                gpu_bytes = 0
            if self._count_memory() + memory_bytes > self._budget:
                leaving |= in_memory
                memory_bytes = 0
        self._bytes_on_gpu[batch] = gpu_bytes
        self._bytes_in_memory[batch] = memory_bytes
        if leaving and self._folder is not None:
            # Called only here, because it visits modules of the model.
            shared_ids = shared()
            moved: dict[int, torch.UntypedStorage] = {}
            for name, storage in leaving.items():
                if name not in shared_ids and storage.nbytes():
                    moved[name] = storage
            self._move(batch, moved, self._folder)
        resident = self._count_memory() + sum(self._bytes_on_gpu.values())
        self.peak_bytes = max(self.peak_bytes, resident)

    def _move(self, batch: int, moved: dict[int, torch.UntypedStorage], folder: Path) -> None:
        """Copy storages of a batch, unless they have a copy, and free their memory."""
        saved = self._saved[batch]
        with scratch_errors(folder):
            for name, storage in moved.items():
                if name not in saved:
                    saved[name] = self._save(folder, storage)
                    self._count_copy(saved[name], 1)
        self._moved[batch] = moved
        self.spilled_bytes = max(self.spilled_bytes, self._file_bytes)
        # Only after all are copied, so that an error leaves the batch as it was.
        for storage in moved.values():
            storage.resize_(0)

    def _count_memory(self) -> int:
        """Count the bytes in memory: of storages, and of copies of those of a GPU."""
        return sum(self._bytes_in_memory.values()) + self._copied_bytes

    def _count_copy(self, saved: _Saved, sign: int) -> None:
        """Add a copy to the counts of bytes, or subtract one."""
        self._copied_bytes += sign * saved.bytes_in_memory
        self._file_bytes += sign * (saved.nbytes - saved.bytes_in_memory)

    def _remove_outdated_copies(self, written: Collection[int]) -> None:
        """Remove the copies of storages that have changed or are gone."""
        for batch, saved_of_batch in self._saved.items():
            # Of all batches: the batch that ran may have written to a tensor of another one.
            outdated = [name for name in written if name in saved_of_batch]
            if batch in self._running:
                outdated = [
                    name
                    for name, saved in saved_of_batch.items()
                    if name in written or saved.is_gone
                ]
            for name in outdated:
                saved = saved_of_batch.pop(name)
                self._count_copy(saved, -1)
                saved.remove()

    def restore(self, batch: int) -> None:
        """Read the storages of a batch back to where they were, before it continues."""
        self._running.add(batch)
        self._bytes_in_memory.pop(batch, None)
        self._bytes_on_gpu.pop(batch, None)
        for name, storage in self._moved.pop(batch, {}).items():
            saved = self._saved[batch][name]
            storage.resize_(saved.nbytes)
            if isinstance(saved.copy, Tensor):
                _view_bytes(storage).copy_(saved.copy)
                continue
            with open(saved.copy, "rb") as file:
                for piece in _pieces(storage):
                    piece.copy_(torch.from_numpy(np.fromfile(file, np.uint8, len(piece))))

    def close(self) -> None:
        """Remove the folder."""
        self._bytes_in_memory.clear()
        self._bytes_on_gpu.clear()
        self._moved.clear()
        self._saved.clear()
        self._copied_bytes = 0
        self._file_bytes = 0
        self._running.clear()
        if self._files and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._files = 0

    def _save(self, folder: Path, storage: torch.UntypedStorage) -> _Saved:
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        nbytes = storage.nbytes()
        is_on_gpu = storage.device.type == "cuda"
        if is_on_gpu and self._count_memory() + nbytes <= self._budget:
            # A GPU reads pinned pages fastest.
            copy = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            copy.copy_(_view_bytes(storage))
            return _Saved(copy, nbytes, reference)
        if not self._files:
            # Fails if the folder exists, because that might be a link to another place.
            folder.mkdir(parents=True)
        self._files += 1
        path = folder / str(self._files)
        with open(path, "wb") as file:
            for piece in _pieces(storage):
                # Storages that numpy sees cannot be resized, so it gets a copy.
                file.write((piece.cpu() if is_on_gpu else piece.clone()).numpy().data)
        self.written_bytes += nbytes
        return _Saved(path, nbytes, reference)


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a storage's bytes, which share its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pieces(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    """Split a storage's bytes into pieces that share its memory."""
    return torch.split(_view_bytes(storage), _PIECE)
