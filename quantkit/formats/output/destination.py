"""The names of an output's files, renames that replace nothing, and what the system refuses, as errors users see."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantkit.errors import DestinationError, NoSpaceError
from quantkit.files.gguf_types import GGUF, STEM, split_stem

MANIFEST = "quantkit.json"
_HERE = -100  # AT_FDCWD
_NO_REPLACE = 1


def manifest_path(model: Path) -> Path:
    """Where the manifest of a model is, or would be.

    Args:
        model: a folder or a file; for a model in several files any of them, or the name that they begin with.
    """
    if model.suffix != GGUF or model.is_dir():
        return model / MANIFEST
    own, inside = _file_manifest(model), model.with_name(MANIFEST)
    of_folder = own.name == f"{STEM}{GGUF}.{MANIFEST}" and inside.is_file() and not own.is_file()
    return inside if of_folder else own


def output_files(dst: Path, weights: Sequence[str]) -> list[str] | None:
    """The files of an output in the order in which they are renamed, the one that readers open last; None for a folder.

    Args:
        weights: names of the files of weights, in order.
    """
    return [_file_manifest(dst).name, *reversed(weights)] if dst.suffix == GGUF else None


def _file_manifest(file: Path) -> Path:
    stem = split_stem(file.name)
    return file.with_name(f"{file.name if stem is None else stem + GGUF}.{MANIFEST}")


@contextlib.contextmanager
def destination_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system into typed ones."""
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
    """Whether a name is in use, even by a broken link.

    Raises:
        OSError: if the system cannot say.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def rename_new(old: Path, new: Path) -> None:
    """Rename without replacing anything.

    Raises:
        FileExistsError: if the new name is in use.
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


def placed_as(old: Path, new: Path) -> None:
    """Rename a complete output to its final name.

    Raises:
        DestinationError: if the name is in use by now, or the system refuses.
    """
    try:
        with destination_errors(new):
            rename_new(old, new)
    except DestinationError as error:
        if not isinstance(error.__cause__, FileExistsError):
            raise
        raise DestinationError(
            "appeared while writing; nothing is overwritten", path=new,
            hint="move it away and repeat it with `resume=True`",
        ) from error  # fmt: skip


def require_absent(dst: Path) -> None:
    """
    Raises:
        DestinationError: if a destination exists.
    """
    with destination_errors(dst):
        exists = is_there(dst)
    if exists:
        raise DestinationError(
            "exists already; nothing is overwritten", path=dst, hint="choose another name or remove it"
        )


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
