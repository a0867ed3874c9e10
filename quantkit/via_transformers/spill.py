"""What stopped batches hold: in memory up to a budget, and beyond it in files, while their
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

_PIECE = 1 << 24


@dataclass
class _Saved:
    """A storage in a file; as long as this lives, no other storage gets its id."""

    path: Path
    nbytes: int
    storage: StorageWeakRef

    @property
    def is_gone(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class Spill:
    """Storages of batches. Each goes to a separate file when all are to hold more than the budget,
    and is written again only if it has changed.

    Attributes:
        peak_bytes: the most that they have held in memory.
        spilled_bytes: the most that was in files.
        written_bytes: all that was written.
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
        self._bytes_in_memory: dict[int, int] = {}  # bytes by batch
        self._moved: dict[int, dict[int, torch.UntypedStorage]] = {}
        self._saved: dict[int, dict[int, _Saved]] = defaultdict(dict)
        self._files = 0
        self.peak_bytes = self.spilled_bytes = self.written_bytes = 0

    def keep(
        self,
        batch: int,
        storages: Mapping[int, torch.UntypedStorage],
        written: Collection[int],
        shared: Callable[[], Collection[int]],
    ) -> None:
        """Take account of the storages of a batch that has stopped, by id.

        Args:
            written: the ids of those that have changed since a batch was kept last.
            shared: returns the ids of those that are not moved.

        Raises:
            DestinationError: if they cannot be written.
        """
        saved = self._saved[batch]
        for own in self._saved.values():
            for name in [name for name, one in own.items() if name in written or one.is_gone]:
                own.pop(name).path.unlink()
        total = sum(storage.nbytes() for storage in storages.values())
        if self._folder is None or sum(self._bytes_in_memory.values()) + total <= self._budget:
            self._bytes_in_memory[batch] = total
            self.peak_bytes = max(self.peak_bytes, sum(self._bytes_in_memory.values()))
            return
        stay = shared()
        moved = {
            name: storage
            for name, storage in storages.items()
            if name not in stay and storage.nbytes() and storage.device.type == "cpu"
        }
        with scratch_errors(self._folder):
            for name, one in moved.items():
                if name not in saved:
                    saved[name] = self._save(self._folder, one)
        self._moved[batch] = moved
        in_files = sum(one.nbytes for saved in self._saved.values() for one in saved.values())
        self.spilled_bytes = max(self.spilled_bytes, in_files)
        for one in moved.values():
            one.resize_(0)

    def restore(self, batch: int) -> None:
        """Give the storages of a batch their memory back, before it goes on."""
        self._bytes_in_memory.pop(batch, None)
        for name, one in self._moved.pop(batch, {}).items():
            saved = self._saved[batch][name]
            one.resize_(saved.nbytes)
            with open(saved.path, "rb") as file:
                for piece in _pieces(one):
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
            # Fails if it exists: it might be a link to another place.
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
    """Return a storage's bytes, some at a time."""
    return torch.split(torch.empty(0, dtype=torch.uint8).set_(storage), _PIECE)
