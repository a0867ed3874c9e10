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
    """A storage in a file. The weak reference keeps its id, so no other storage gets it."""

    path: Path
    nbytes: int
    storage: StorageWeakRef

    @property
    def is_gone(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class Spill:
    """Storages of batches. Each is moved to a file of its own when all together would exceed the
    budget, and is written again only if it has changed.

    Attributes:
        peak_bytes: the most bytes that were in memory.
        spilled_bytes: the most bytes that were in files.
        written_bytes: all bytes that were written.
    """

    def __init__(self, folder: Path | None = None, memory_bytes: int = 0) -> None:
        """
        Args:
            folder: is made when first needed, and removed by `close`; without one, all is kept in
                memory.
            memory_bytes: the budget.
        """
        self._folder = folder
        self._budget = memory_bytes
        # By batch.
        self._bytes_in_memory: dict[int, int] = {}
        self._moved: dict[int, dict[int, torch.UntypedStorage]] = {}
        self._saved: dict[int, dict[int, _Saved]] = defaultdict(dict)
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
        """Count the storages of a batch that has stopped, by id, and move them to files if they
        exceed the budget.

        Args:
            written: the ids of storages that have changed since a batch was kept last.
            shared: returns the ids of storages that are not moved.

        Raises:
            DestinationError: if they cannot be written.
        """
        saved = self._saved[batch]
        self._remove_outdated_files(written)
        total = sum(storage.nbytes() for storage in storages.values())
        if self._folder is None or sum(self._bytes_in_memory.values()) + total <= self._budget:
            self._bytes_in_memory[batch] = total
            self.peak_bytes = max(self.peak_bytes, sum(self._bytes_in_memory.values()))
            return
        # Called only here, because it visits all modules of the model.
        shared_ids = shared()
        moved: dict[int, torch.UntypedStorage] = {}
        for name, storage in storages.items():
            # A meta tensor's storage has a size, but no memory.
            if name not in shared_ids and storage.nbytes() and storage.device.type == "cpu":
                moved[name] = storage
        with scratch_errors(self._folder):
            for name, storage in moved.items():
                if name not in saved:
                    saved[name] = self._save(self._folder, storage)
        self._moved[batch] = moved
        in_files = 0
        for saved_of_batch in self._saved.values():
            in_files += sum(saved_storage.nbytes for saved_storage in saved_of_batch.values())
        self.spilled_bytes = max(self.spilled_bytes, in_files)
        # Only after all are written, so that an error leaves the batch as it was.
        for storage in moved.values():
            storage.resize_(0)

    def _remove_outdated_files(self, written: Collection[int]) -> None:
        """Remove the files of storages that have changed or are gone."""
        # Of all batches: the batch that ran may have written to a tensor of another one.
        for saved_of_batch in self._saved.values():
            for name, saved in list(saved_of_batch.items()):
                if name in written or saved.is_gone:
                    del saved_of_batch[name]
                    saved.path.unlink()

    def restore(self, batch: int) -> None:
        """Read the storages of a batch back into memory, before it continues."""
        self._bytes_in_memory.pop(batch, None)
        for name, storage in self._moved.pop(batch, {}).items():
            saved = self._saved[batch][name]
            storage.resize_(saved.nbytes)
            with open(saved.path, "rb") as file:
                for piece in _pieces(storage):
                    piece.copy_(torch.from_numpy(np.fromfile(file, np.uint8, len(piece))))

    def close(self) -> None:
        """Remove the folder."""
        self._bytes_in_memory.clear()
        self._moved.clear()
        self._saved.clear()
        if self._files and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._files = 0

    def _save(self, folder: Path, storage: torch.UntypedStorage) -> _Saved:
        if not self._files:
            # Fails if the folder exists, because that might be a link to another place.
            folder.mkdir(parents=True)
        self._files += 1
        path = folder / str(self._files)
        with open(path, "wb") as file:
            for piece in _pieces(storage):
                # Storages that numpy sees cannot be resized.
                file.write(piece.clone().numpy().data)
        self.written_bytes += storage.nbytes()
        return _Saved(path, storage.nbytes(), StorageWeakRef(storage))  # type: ignore[no-untyped-call]


def _pieces(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    """Split a storage's bytes into pieces that share its memory."""
    return torch.split(torch.empty(0, dtype=torch.uint8).set_(storage), _PIECE)
