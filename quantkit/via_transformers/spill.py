"""What stopped batches hold: in memory up to a budget, and beyond it in files, while their tensors have no memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantkit.formats.output.destination import scratch_errors

_PIECE = 1 << 24


class Spill:
    """Storages of batches. A file per batch is written when all are to hold more than the budget.

    Attributes:
        peak_bytes: the most that they have held in memory.
        spilled_bytes: the most that was in files.
    """

    def __init__(self, folder: Path | None = None, memory_bytes: int = 0) -> None:
        """
        Args:
            folder: is made when first needed, and removed by `close`; without one, all is kept in memory.
            memory_bytes: the budget.
        """
        self._folder, self._budget = folder, memory_bytes
        self._held: dict[int, int] = {}  # bytes by batch
        self._moved: dict[int, list[torch.UntypedStorage]] = {}
        self._sizes: dict[int, list[int]] = {}
        self._made = False
        self.peak_bytes = self.spilled_bytes = 0

    def keep(
        self, batch: int, storages: Mapping[int, torch.UntypedStorage], shared: Callable[[], Collection[int]]
    ) -> None:
        """Take account of the storages of a batch that has stopped, by id; those of `shared` ids are not moved. Raises
        `DestinationError` if they cannot be written."""
        total = sum(one.nbytes() for one in storages.values())
        if self._folder is None or sum(self._held.values()) + total <= self._budget:
            self._held[batch] = total
            self.peak_bytes = max(self.peak_bytes, sum(self._held.values()))
            return
        stay = shared()
        own = [one for name, one in storages.items() if name not in stay and one.nbytes() and one.device.type == "cpu"]
        with scratch_errors(self._folder):
            if not self._made:
                self._folder.mkdir(parents=True)  # fails if it exists: it might be a link to another place
                self._made = True
            with open(self._folder / str(batch), "wb") as file:
                for one in own:
                    for piece in _pieces(one):
                        file.write(piece.clone().numpy().data)  # storages that numpy sees cannot be resized
        self._moved[batch], self._sizes[batch] = own, [one.nbytes() for one in own]
        self.spilled_bytes = max(self.spilled_bytes, sum(map(sum, self._sizes.values())))
        for one in own:
            one.resize_(0)

    def restore(self, batch: int) -> None:
        """Give the storages of a batch their memory back, before it goes on."""
        self._held.pop(batch, None)
        if batch not in self._moved:
            return
        assert self._folder is not None
        path = self._folder / str(batch)
        with open(path, "rb") as file:
            for one, size in zip(self._moved.pop(batch), self._sizes.pop(batch), strict=True):
                one.resize_(size)
                for piece in _pieces(one):
                    piece.copy_(torch.from_numpy(np.fromfile(file, np.uint8, len(piece))))
        path.unlink()

    def close(self) -> None:
        """Remove the folder."""
        self._held.clear()
        self._moved.clear()
        self._sizes.clear()
        if self._made and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._made = False


def _pieces(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    """A storage's bytes, some at a time."""
    return torch.split(torch.empty(0, dtype=torch.uint8).set_(storage), _PIECE)
