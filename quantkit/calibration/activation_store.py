"""Calibration activations: on a card and in memory up to budgets, beyond them in files."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import DestinationError, NoSpaceError


class ActivationStore:
    """float32 tensors by key. Those that come from a card stay there within a budget of its own; what exceeds the
    budget of memory lies in a folder.

    The folder is made when first needed and is gone after `close`.
    """

    def __init__(self, folder: Path, memory_bytes: int, gpu_bytes: int = 0) -> None:
        """
        Args:
            folder: where the files go; leftovers of a killed run there are removed.
            memory_bytes: how much may be held in memory; each of several processes has this for
                itself, for its share of the samples.
            gpu_bytes: how much may be held on the card that tensors come from.
        """
        self._folder = folder
        self._free = {True: memory_bytes, False: gpu_bytes}  # by whether it is the host's
        self._held: dict[Hashable, Tensor] = {}
        self._files: dict[Hashable, tuple[Path, torch.Size]] = {}
        self._count = 0
        self._made = False
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, key: Hashable, value: Tensor) -> None:
        """Keep a tensor under a key that is not in use.

        Raises:
            DestinationError: if it does not fit in memory and cannot be written.
        """
        if not _on_host(value) and value.nbytes > self._free[False]:
            value = _brought_home(value, stays=value.nbytes <= self._free[True])
        if value.nbytes <= self._free[_on_host(value)]:
            self._free[_on_host(value)] -= value.nbytes
            self._held[key] = value
            return
        path = self._folder / str(self._count)
        self._count += 1
        try:
            if not self._made:
                self._folder.mkdir(parents=True)  # not one that is there, which might be a link to elsewhere
                self._made = True
            _write(path, value)
        except OSError as error:
            kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else DestinationError
            raise kind(
                f"calibration activations cannot be written: {error.strerror or error}", path=self._folder,
                hint="free some space, or give more `activation_memory`, and repeat it with `resume=True`",
            ) from error  # fmt: skip
        self._files[key] = path, value.shape

    def take(self, key: Hashable) -> Tensor:
        """Give back a tensor, where it was kept, and forget it."""
        if key in self._held:
            value = self._held.pop(key)
            self._free[_on_host(value)] += value.nbytes
            return value
        path, shape = self._files.pop(key)
        value = torch.from_numpy(np.fromfile(path, dtype=np.float32)).view(shape)
        path.unlink()
        return value

    def rows(self, key: Hashable, numbers: Tensor) -> Tensor:
        """Some rows [N, D] of a tensor [..., D], which stays."""
        if key in self._held:
            value = self._held[key]
            return value.flatten(0, -2)[numbers.to(value.device)]
        return torch.from_numpy(self._mapped(key, "r")[numbers.numpy()])

    def add_rows(self, key: Hashable, numbers: Tensor, values: Tensor) -> None:
        """Add to some rows of a tensor [..., D], each named once, values [N, D]."""
        if key in self._held:
            value = self._held[key]
            value.view(-1, value.shape[-1]).index_add_(0, numbers.to(value.device), values.to(value.device))
        else:
            self._mapped(key, "r+")[numbers.numpy()] += values.cpu().numpy()

    def _mapped(self, key: Hashable, mode: Literal["r", "r+"]) -> np.memmap[Any, np.dtype[np.float32]]:
        """The rows of a tensor in a file."""
        path, shape = self._files[key]
        return np.memmap(path, np.float32, mode, shape=(shape[:-1].numel(), shape[-1]))

    def close(self) -> None:
        """Forget everything and remove the folder."""
        self._held.clear()
        self._files.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def _brought_home(value: Tensor, *, stays: bool) -> Tensor:
    """A card's tensor in the host's memory: in pages that cannot move if it stays there, as a card reads these best."""
    if not stays or value.device.type != "cuda":
        return value.cpu()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)


def _write(path: Path, value: Tensor) -> None:
    value.contiguous().numpy().tofile(path)
