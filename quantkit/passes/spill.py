"""Keep the tensors of stopped batches in memory up to a budget, and beyond it in files, while the
tensors have no memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quantkit.passes.activation_store import ActivationStore

_KEY = "storages of batches"


@dataclass(frozen=True)
class _Saved:
    """What the store has of a storage. The weak reference keeps the storage's id, so no other
    storage gets it.
    """

    nbytes: int
    storage: StorageWeakRef

    @property
    def is_gone(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class Spill:
    """Storages of batches. Each is moved to a file of a store when all together would exceed its
    budget of memory, and is written again only if it has changed. Storages on a GPU have a budget
    of their own, beyond which they are moved to memory, as far as that has room, and to files.

    Attributes:
        peak_bytes: the most bytes that were in memory, the store's own too, and on a GPU.
        spilled_bytes: the most bytes that were in files.
    """

    def __init__(
        self, store: ActivationStore | None = None, gpu_bytes: int = 0, other_bytes: int = 0
    ) -> None:
        """
        Args:
            store: None leaves all storages where they are.
            gpu_bytes: the budget of a GPU.
            other_bytes: of memory that is in use meanwhile.
        """
        self._store = store
        self._gpu_budget = gpu_bytes
        self._other_bytes = other_bytes
        # By batch: of its storages where they are.
        self._bytes_in_memory: dict[int, int] = {}
        self._bytes_on_gpu: dict[int, int] = {}
        self._moved: dict[int, dict[int, torch.UntypedStorage]] = {}
        self._saved: dict[int, dict[int, _Saved]] = defaultdict(dict)
        # Batches that have run since they were kept: only theirs have lost storages.
        self._running: set[int] = set()
        self.peak_bytes = 0
        self.spilled_bytes = 0

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
        store = self._store
        if store is not None:
            if sum(self._bytes_on_gpu.values()) + gpu_bytes > self._gpu_budget:
                leaving |= on_gpu
                gpu_bytes = 0
            self._reserve(store)
            if not store.has_room(memory_bytes):
                leaving |= in_memory
                memory_bytes = 0
        self._bytes_on_gpu[batch] = gpu_bytes
        self._bytes_in_memory[batch] = memory_bytes
        if store is not None:
            self._reserve(store)
            if leaving:
                # Called only here, because it visits modules of the model.
                shared_ids = shared()
                moved: dict[int, torch.UntypedStorage] = {}
                for name, storage in leaving.items():
                    if name not in shared_ids and storage.nbytes():
                        moved[name] = storage
                self._move(batch, moved, store)
        resident = sum(self._bytes_in_memory.values()) + sum(self._bytes_on_gpu.values())
        if store is not None:
            resident += store.bytes_in_memory
        self.peak_bytes = max(self.peak_bytes, resident)

    def _reserve(self, store: ActivationStore) -> None:
        """Count the memory of storages, and what else is in use, in the store's budget."""
        store.reserve(_KEY, sum(self._bytes_in_memory.values()) + self._other_bytes)

    def _move(
        self, batch: int, moved: dict[int, torch.UntypedStorage], store: ActivationStore
    ) -> None:
        """Copy storages of a batch, unless they have a copy, and free their memory."""
        saved = self._saved[batch]
        for name, storage in moved.items():
            if name not in saved:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                # What leaves memory cannot stay there as a copy.
                is_in_memory = storage.device.type == "cpu"
                store.put((_KEY, batch, name), _view_bytes(storage), to_file=is_in_memory)
                saved[name] = _Saved(storage.nbytes(), reference)
        self._moved[batch] = moved
        self.spilled_bytes = max(self.spilled_bytes, store.file_bytes)
        # Only after all are copied, so that an error leaves the batch as it was.
        for storage in moved.values():
            storage.resize_(0)

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
                self._forget(batch, name)

    def restore(self, batch: int) -> None:
        """Read the storages of a batch back to where they were, before it continues."""
        self._running.add(batch)
        self._bytes_in_memory.pop(batch, None)
        self._bytes_on_gpu.pop(batch, None)
        for name, storage in self._moved.pop(batch, {}).items():
            assert self._store is not None
            storage.resize_(self._saved[batch][name].nbytes)
            self._store.read_into((_KEY, batch, name), _view_bytes(storage))

    def close(self) -> None:
        """Free what the store has of the batches."""
        for batch, saved_of_batch in self._saved.items():
            for name in list(saved_of_batch):
                self._forget(batch, name)
        self._saved.clear()
        self._bytes_in_memory.clear()
        self._bytes_on_gpu.clear()
        self._moved.clear()
        self._running.clear()
        if self._store is not None:
            self._store.reserve(_KEY, 0)

    def _forget(self, batch: int, name: int) -> None:
        """Remove the copy of a storage of a batch."""
        del self._saved[batch][name]
        assert self._store is not None
        self._store.remove((_KEY, batch, name))


def _view_bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a storage's bytes, which share its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
