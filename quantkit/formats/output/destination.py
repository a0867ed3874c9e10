"""What the system refuses of a destination, as errors users see; and a rename that replaces nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from quantkit.errors import DestinationError, NoSpaceError

_HERE = -100  # AT_FDCWD
_NO_REPLACE = 1


@contextlib.contextmanager
def destination_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusals into one-line errors."""
    try:
        yield
    except OSError as error:
        raise destination_error(error, path) from error


def destination_error(error: OSError, path: Path) -> DestinationError:
    """The typed form of a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError("the disk is full", path=path, hint="free some space and repeat it with `resume=True`")
    return DestinationError(f"cannot be written: {error.strerror or error}", path=path)


def is_there(path: Path) -> bool:
    """Whether a name is taken, be it by a link that leads nowhere.

    Raises:
        OSError: if that cannot be told.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def rename_new(old: Path, new: Path) -> None:
    """Rename, but not onto anything that is there.

    Raises:
        FileExistsError: if something is.
        OSError: if the system refuses.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # some systems and file systems lack it
    if rename is not None:
        if rename(_HERE, os.fsencode(old), _HERE, os.fsencode(new), _NO_REPLACE) == 0:
            return
        if ctypes.get_errno() == errno.EEXIST:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    if is_there(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    old.rename(new)
