"""Files that are one output together, each of which gets its name beside the partial folder."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.formats.output.destination import destination_errors, placed_as, require_absent, sync_folder
from quantkit.formats.output.own_folder import OwnFolder, not_ours

ENTRY = "placed"
"""The key of the journal's entry that says which files are about to get their names."""


class PlacedFiles:
    """Names beside each other. The last is that of the file which readers open: the output is there once that is.

    What a run that was interrupted meanwhile has placed, the next one takes back into the partial folder; the journal
    tells these files by what stays the same when they are renamed, so that nothing else is taken.

    Attributes:
        complete: whether all files have their names.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """
        Args:
            folder: that they are placed in.
            names: in the order in which they are placed.
        """
        self._folder = folder
        self._names = names
        self.complete = False

    def require_absent(self) -> None:
        """
        Raises:
            DestinationError: if something has one of the names.
        """
        for name in self._names:
            require_absent(self._folder / name)

    def place(self, partial: OwnFolder, record: Callable[[Mapping[str, Any]], None]) -> None:
        """Give the files of a partial folder their names: all of them, or none.

        Args:
            record: adds to the journal.

        Raises:
            DestinationError: if a name has been taken meanwhile, or the system refuses.
        """
        told = {name: _identity(partial.path / name) for name in self._names}
        record({ENTRY: told})
        *others, last = self._names
        try:
            for name in others:
                placed_as(partial.path / name, self._folder / name)
            with destination_errors(self._folder):
                sync_folder(self._folder)
            placed_as(partial.path / last, self._folder / last)
            self.complete = True
        except BaseException:
            self.complete = _identity(self._folder / last) == told[last]
            if not self.complete:
                self.take_back(partial, [{ENTRY: told}])
            raise
        with contextlib.suppress(OSError):
            sync_folder(self._folder)

    def take_back(self, partial: OwnFolder, entries: Iterable[Mapping[str, Any]]) -> None:
        """Undo what an interrupted `place` has done.

        Args:
            entries: of the journal; those of other kinds are passed over.

        Raises:
            ResumeError: if an entry is of another form, or a file is there twice.
            DestinationError: if the system refuses.
        """
        for entry in entries:
            told = entry.get(ENTRY, {})
            if not isinstance(told, dict):
                raise not_ours(partial.path)
            for name in self._names:
                path = self._folder / name
                if name in told and _identity(path) == told[name]:
                    placed_as(path, partial.path / name)


def _identity(path: Path) -> list[int] | None:
    """What tells a file from others, and stays when it is renamed; None where there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns] if stat.S_ISREG(found.st_mode) else None
