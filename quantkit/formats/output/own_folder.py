"""A folder that this user owns, accessed by its descriptor, so that no link is followed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from quantkit.errors import ResumeError
from quantkit.formats.output.destination import destination_error, destination_errors

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not block
_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR)
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)


class OwnFolder:
    """A folder of plain files of one owner: no links, pipes, or hard links elsewhere."""

    def __init__(self, path: Path, *, made: bool = False) -> None:
        """
        Args:
            path: the folder.
            made: whether this process has just created it; some file systems report another owner then.

        Raises:
            ResumeError: if it is a link, a file, or another user's folder.
            DestinationError: if it cannot be opened.
        """
        self.path = path
        try:
            self._handle = os.open(path, _FOLDER)
        except OSError as error:
            if error.errno in _NO_FOLDER:
                raise in_the_way(path) from error
            raise destination_error(error, path) from error
        self._owner = os.fstat(self._handle).st_uid
        if not made and self._owner != os.geteuid():
            self.close()
            raise ResumeError("belongs to another user", path=path, hint="choose another destination")

    def names(self) -> list[str]:
        """The names in it, sorted."""
        with destination_errors(self.path):
            return sorted(os.listdir(self._handle))

    def size(self, name: str) -> int:
        """The bytes of a file.

        Raises:
            ResumeError: if it is no plain file of the owner.
            DestinationError: if it does not exist.
        """
        with destination_errors(self.path / name):
            return self._checked(name, os.stat(name, dir_fd=self._handle, follow_symlinks=False)).st_size

    def open(self, name: str, *, create: bool = True, buffering: int = -1) -> BinaryIO:
        """Open a file to read and write it from the beginning; its content stays.

        Raises:
            ResumeError: if it is no plain file of the owner, or is missing and `create` is not set.
            DestinationError: if the system refuses.
        """
        path = self.path / name
        if Path(name).name != name:
            raise not_ours(path)
        try:
            handle = os.open(name, _FILE | (os.O_CREAT if create else 0), 0o666, dir_fd=self._handle)
        except OSError as error:
            if error.errno in _NO_FILE or (error.errno == errno.ENOENT and not create):
                raise not_ours(path) from error
            raise destination_error(error, path) from error
        try:
            self._checked(name, os.fstat(handle))
        except ResumeError:
            os.close(handle)
            raise
        return os.fdopen(handle, "r+b", buffering)

    def write(self, name: str, content: bytes) -> None:
        """Write a file and wait until it is on disk."""
        with destination_errors(self.path / name), self.open(name) as file:
            file.truncate(0)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, name: str) -> None:
        """Remove a file, a link, or a folder with its content."""
        with destination_errors(self.path / name):
            if stat.S_ISDIR(os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=self._handle)
            else:
                os.unlink(name, dir_fd=self._handle)

    def is_at(self, path: Path) -> bool:
        """Whether a path, which is no link itself, leads to this folder."""
        try:
            return os.path.samestat(path.lstat(), os.fstat(self._handle))
        except OSError:
            return False

    def sync(self) -> None:
        """Wait until the names in it are on disk."""
        with destination_errors(self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the descriptor; it may be called more than once."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _checked(self, name: str, found: os.stat_result) -> os.stat_result:
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid != self._owner:
            raise not_ours(self.path / name)
        return found


def not_ours(path: Path) -> ResumeError:
    """The error for something in a partial folder that no run of quantkit leaves."""
    return ResumeError(
        "is not what the interrupted run left", path=path, hint="remove the partial folder and start anew"
    )


def in_the_way(path: Path) -> ResumeError:
    """The error for something else at the path of a partial folder."""
    return ResumeError(
        "is in the way, and no interrupted run of quantkit", path=path, hint="choose another destination"
    )
