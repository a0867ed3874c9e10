"""An output of several files, which are renamed from the partial folder to its parent folder."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.formats.output import destination
from quantkit.formats.output.destination import (
    OwnFolder,
    build_not_ours_error,
    destination_errors,
    place_output,
    sync_folder,
)

ENTRY = "placed"
"""The key of the journal's entry with the files that are about to be renamed."""


class PlacedFiles:
    """Renames files one by one. The last is the file that readers open: with it the output exists.

    If a run is interrupted in between, the next one moves the files back into the partial folder.
    The journal has their inode, size and time, so that no other file is moved.

    Attributes:
        complete: whether all files are renamed.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Take the final folder, and the names of the files in the order of the renames."""
        self._folder = folder
        self._names = names
        self.complete = False

    def require_absent(self) -> None:
        """Raise a `DestinationError` if one of the names is in use."""
        for name in self._names:
            destination.require_absent(self._folder / name)

    def place(self, partial: OwnFolder, record: Callable[[Mapping[str, Any]], None]) -> None:
        """Rename all files of a partial folder, or none; `record` adds to the journal.

        Raises:
            DestinationError: if a name is in use by now, or the system refuses.
        """
        identities = {name: _read_identity(partial.path / name) for name in self._names}
        # Before the first rename, as the next run finds the files of a killed one by this entry.
        record({ENTRY: identities})
        *earlier_names, last = self._names
        try:
            for name in earlier_names:
                place_output(partial.path / name, self._folder / name)
            # The other names must be on disk before the one that makes the output exist.
            with destination_errors(self._folder):
                sync_folder(self._folder)
            place_output(partial.path / last, self._folder / last)
            self.complete = True
        except BaseException:
            # An interruption can come between the last rename and the next line.
            self.complete = _read_identity(self._folder / last) == identities[last]
            if not self.complete:
                self.take_back(partial, [{ENTRY: identities}])
            raise
        # The output exists, so nothing may fail any more.
        with contextlib.suppress(OSError):
            sync_folder(self._folder)

    def take_back(self, partial: OwnFolder, entries: Iterable[Mapping[str, Any]]) -> None:
        """Undo what an interrupted `place` has done, by the journal's entries, of which other kinds
        are skipped.

        Raises:
            ResumeError: if an entry has another form.
            DestinationError: if the system refuses.
        """
        for entry in entries:
            identities = entry.get(ENTRY, {})
            if not isinstance(identities, dict):
                raise build_not_ours_error(partial.path)
            for name in self._names:
                path = self._folder / name
                if name in identities and _read_identity(path) == identities[name]:
                    place_output(path, partial.path / name)


def _read_identity(path: Path) -> list[int] | None:
    """Read the properties of a file that a rename keeps; None if there is no file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if stat.S_ISREG(status.st_mode):
        return [status.st_ino, status.st_size, status.st_mtime_ns]
    return None
