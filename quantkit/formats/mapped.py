"""Reading tensors as views of mapped files, without the maps piling up in memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

MAPPED_BYTES = 1 << 25
"""Pages of a source's files that may lie in memory before they are given back."""
_MADV_DONTNEED = 4

Opener = Callable[[Path], Callable[[str], Tensor]]


class MappedFile:
    """One weight file, mapped on first use, whose pages are given back every so many bytes.

    Pages of a map count as the process's memory once touched. Views stay valid when
    pages are given back: they are read again from the file if touched again.
    """

    def __init__(self, path: Path, opener: Opener, *, private_map: bool, sharers: int = 1) -> None:
        """Open nothing yet.

        Args:
            opener: maps the file; its result gives views by name.
            private_map: the views are known to lie in a private map of the file itself,
                so that the kernel may be told to drop their pages; otherwise the file
                is mapped afresh instead.
            sharers: files read together, which share one budget.
        """
        self.path = path
        self._opener = opener
        self._private_map = private_map
        self._budget = MAPPED_BYTES // sharers
        self._get: Callable[[str], Tensor] | None = None
        self._touched = 0
        self._views: list[Tensor] = []
        self._dropped: list[Tensor] = []

    def tensor(self, name: str) -> Tensor:
        """The named tensor as a view of the file."""
        self.trim()
        if self._get is None:
            self._get = self._opener(self.path)
        tensor = self._get(name)
        self._touched += tensor.nbytes
        if self._private_map:
            self._views.append(tensor)
        return tensor

    def trim(self) -> None:
        """Give pages back if more than the budget were touched."""
        if self._touched <= self._budget:
            return
        if self._private_map:
            for view in self._dropped + self._views:  # whoever still read a dropped one has brought it back
                _drop_pages(view)
            self._dropped, self._views = self._views, []
        else:
            self._get = None
        self._touched = 0


def _drop_pages(view: Tensor) -> None:
    """Tell the kernel that the pages under a view need not stay in memory; only advice."""
    storage = view.untyped_storage()
    start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = storage.data_ptr() + storage.nbytes() - start
    libc = ctypes.CDLL(None)
    if length > 0 and hasattr(libc, "madvise"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)
