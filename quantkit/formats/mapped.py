"""Reading tensors as views of mapped files, without the maps piling up in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

_BUDGET_BYTES = 1 << 26

Opener = Callable[[Path], Callable[[str], Tensor]]


class MappedFile:
    """One weight file, mapped on first use and mapped afresh every so many bytes.

    Pages of a map count as the process's memory once touched. Dropping the map gives
    them back; tensors still held keep their own map alive, so views stay valid.
    """

    def __init__(self, path: Path, opener: Opener) -> None:
        self.path = path
        self._opener = opener
        self._get: Callable[[str], Tensor] | None = None
        self._touched = 0

    def tensor(self, name: str) -> Tensor:
        """The named tensor as a view of the file."""
        if self._get is None or self._touched > _BUDGET_BYTES:
            self._get = None
            self._get = self._opener(self.path)
            self._touched = 0
        tensor = self._get(name)
        self._touched += tensor.nbytes
        return tensor
