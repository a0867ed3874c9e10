"""The names of an output's files, renames that replace nothing, a folder in which no link is
followed, and the system's errors in a form for users.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from quantkit.base.memory import size_text
from quantkit.base.messages import Message, Option
from quantkit.errors import DestinationError, NoSpaceError, ResumeError
from quantkit.files.gguf_types import GGUF_SUFFIX, STEM, parse_part_stem

MANIFEST = "quantkit.json"
JOURNAL = ".quantkit-journal.jsonl"
WRITER = ".quantkit-writer"
"""The file with the process and the machine that locked the journal last."""
SPACE_MARGIN = 16 << 20
"""Bytes of the disk that an output leaves free."""
# Python has no names for AT_FDCWD and RENAME_NOREPLACE, which `renameat2` takes.
_HERE = -100
_NO_REPLACE = 1
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# Opening a pipe must not block.
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
# What the system says of a link, a file or a folder in place of the other, a socket or a device.
_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR)
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)


def manifest_path(model: Path) -> Path:
    """Return where the manifest of a model is, or would be.

    Args:
        model: a folder or a file; for a model in several files any of them, or the name that they
            begin with.
    """
    if model.suffix != GGUF_SUFFIX or model.is_dir():
        return model / MANIFEST
    beside_file = _file_manifest(model)
    in_folder = model.with_name(MANIFEST)
    # A folder that holds a GGUF model gives its file this name, and has one manifest for all files.
    has_name_in_folder = beside_file.name == f"{STEM}{GGUF_SUFFIX}.{MANIFEST}"
    if has_name_in_folder and in_folder.is_file() and not beside_file.is_file():
        return in_folder
    return beside_file


def list_placed_files(dst: Path, weights: Sequence[str]) -> list[str] | None:
    """List the files of an output in the order in which they are renamed, the one that readers
    open last; None for a folder.

    Args:
        weights: names of the files of weights, in order.
    """
    if dst.suffix == GGUF_SUFFIX:
        return [_file_manifest(dst).name, *reversed(weights)]
    return None


def _file_manifest(file: Path) -> Path:
    """Name the manifest beside a model's file; all parts of a model share one."""
    stem = parse_part_stem(file.name)
    model_name = file.name if stem is None else stem + GGUF_SUFFIX
    return file.with_name(f"{model_name}.{MANIFEST}")


@contextlib.contextmanager
def destination_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system into typed ones."""
    try:
        yield
    except OSError as error:
        raise destination_error(error, path) from error


def destination_error(error: OSError, path: Path) -> DestinationError:
    """Convert a failed write into its typed form."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(
            "the disk is full",
            path=path,
            hint=Message("free some space and repeat it with ", Option("resume", value=True)),
        )
    return DestinationError(f"cannot be written: {error.strerror or error}", path=path)


@contextlib.contextmanager
def scratch_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the system into typed ones where calibration activations are written to a
    folder.
    """
    try:
        yield
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else DestinationError
        raise kind(
            f"calibration activations cannot be written: {error.strerror or error}",
            path=folder,
            hint=(
                Message(
                    "free some space, or increase ",
                    Option("activation_memory"),
                    ", and repeat it with ",
                    Option("resume", value=True),
                )
            ),
        ) from error


def is_there(path: Path) -> bool:
    """Tell whether a name is in use, even by a broken link; an `OSError` if the system cannot
    say.
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
    # Python's own renames replace files and empty folders.
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    name_is_used = False
    if rename is not None:
        status = rename(_HERE, os.fsencode(old), _HERE, os.fsencode(new), _NO_REPLACE)
        if status == 0:
            return
        name_is_used = ctypes.get_errno() == errno.EEXIST
    if name_is_used or is_there(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    # Some systems and file systems lack `renameat2`. There, a name that appears in between can be
    # replaced.
    old.rename(new)


def place_output(old: Path, new: Path) -> None:
    """Rename a complete output to its final name.

    Raises:
        DestinationError: if the name is in use by now, or the system refuses.
    """
    try:
        rename_new(old, new)
    except FileExistsError as error:
        hint = Message("move it away and repeat it with ", Option("resume", value=True))
        raise DestinationError(
            "appeared while writing; nothing is overwritten", path=new, hint=hint
        ) from error
    except OSError as error:
        raise destination_error(error, new) from error


def require_absent(dst: Path) -> None:
    """Raise a `DestinationError` if a destination exists."""
    with destination_errors(dst):
        exists = is_there(dst)
    if exists:
        hint = "choose another name or remove it"
        raise DestinationError("exists already; nothing is overwritten", path=dst, hint=hint)


def require_space(folder: Path, needed_bytes: int, spare_bytes: int = SPACE_MARGIN) -> None:
    """Raise a `NoSpaceError` if the disk of a folder, which need not exist, has less free space
    than needed and spare bytes together.
    """
    with destination_errors(folder):
        disk = shutil.disk_usage(_find_existing_folder(folder))
    # A file system such as /proc.
    if disk.total == 0:
        raise DestinationError("cannot be written: it is not on a disk", path=folder.parent)
    if disk.free < needed_bytes + spare_bytes:
        raise NoSpaceError(
            "too little space on the disk",
            path=folder.parent,
            found=f"{size_text(disk.free)} free",
            expected=size_text(needed_bytes + spare_bytes),
        )


def _find_existing_folder(folder: Path) -> Path:
    """Find the innermost folder on a path that exists; the root always does."""
    absolute = folder.absolute()
    for parent in (absolute, *absolute.parents):
        if parent.is_dir():
            return parent
    return Path(absolute.anchor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class OwnFolder:
    """A folder, accessed by its descriptor, of plain files of one owner: no links, pipes, or hard
    links elsewhere.

    It may have folders of such files, whose names are ``folder/file``.

    Every method raises a `ResumeError` if a name is not such a file, and a `DestinationError` if
    the system refuses.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        """Open the folder, which must be a real one of this user.

        Args:
            is_new: whether this process has just created it; some file systems report another owner
                then.

        Raises:
            ResumeError: if it is a link, a file, or another user's folder.
        """
        self.path = path
        self._folders: dict[str, int] = {}
        try:
            self._handle = os.open(path, _FOLDER)
        except OSError as error:
            if error.errno in _NO_FOLDER:
                raise build_occupied_error(path) from error
            raise destination_error(error, path) from error
        self._owner = os.fstat(self._handle).st_uid
        if not is_new and self._owner != os.geteuid():
            self.close()
            raise ResumeError(
                "belongs to another user", path=path, hint="choose another destination"
            )

    def add_folders(self, names: Iterable[str]) -> None:
        """Let it have folders with these names, which are created if they do not exist."""
        for name in names:
            path = self.path / name
            with destination_errors(path):
                # That of an interrupted run; opening it refuses anything but a folder.
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self._handle)
                try:
                    self._folders[name] = os.open(name, _FOLDER, dir_fd=self._handle)
                except OSError as error:
                    if error.errno in _NO_FOLDER:
                        raise build_not_ours_error(path) from error
                    raise

    def names(self) -> list[str]:
        """List the names in it and its folders, sorted; an unknown folder is a name, whatever it
        contains.
        """
        names: list[str] = []
        with destination_errors(self.path):
            for name in os.listdir(self._handle):
                if name not in self._folders:
                    names.append(name)
            for folder, handle in self._folders.items():
                for name in os.listdir(handle):
                    names.append(f"{folder}/{name}")
        return sorted(names)

    def size(self, name: str) -> int:
        """Look up the size of a file in bytes."""
        handle, file_name = self._locate(name)
        with destination_errors(self.path / name):
            status = os.stat(file_name, dir_fd=handle, follow_symlinks=False)
            return self._require_own_file(name, status).st_size

    def open(self, name: str, *, create: bool = True, buffering: int = -1) -> BinaryIO:
        """Open a file to read and write it from the beginning; its content stays. Without `create`,
        a missing file is a `ResumeError`.
        """
        path = self.path / name
        folder, file_name = self._locate(name)
        flags = _FILE
        if create:
            flags |= os.O_CREAT
        try:
            handle = os.open(file_name, flags, 0o666, dir_fd=folder)
        except OSError as error:
            is_missing = error.errno == errno.ENOENT and not create
            if error.errno in _NO_FILE or is_missing:
                raise build_not_ours_error(path) from error
            raise destination_error(error, path) from error
        # The check is of the open file, since the name may lead to another one by then.
        try:
            self._require_own_file(name, os.fstat(handle))
        except ResumeError:
            os.close(handle)
            raise
        return os.fdopen(handle, "r+b", buffering)

    def write(self, name: str, content: bytes) -> None:
        """Write a file and wait until it is on disk."""
        with destination_errors(self.path / name), self.open(name) as file:
            # Not with `O_TRUNC`, which would empty a file before its owner is checked.
            file.truncate(0)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, name: str) -> None:
        """Remove a file, a link, or a folder with its content."""
        handle, file_name = self._locate(name)
        with destination_errors(self.path / name):
            status = os.stat(file_name, dir_fd=handle, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(file_name, dir_fd=handle)
            else:
                os.unlink(file_name, dir_fd=handle)

    def is_at(self, path: Path) -> bool:
        """Tell whether a path leads to this folder, with its folders still in it, and none of them
        by a link.
        """
        handles = {path: self._handle}
        for name, handle in self._folders.items():
            handles[path / name] = handle
        try:
            for folder, handle in handles.items():
                if not os.path.samestat(folder.lstat(), os.fstat(handle)):
                    return False
        except OSError:
            return False
        return True

    def sync(self) -> None:
        """Wait until the names in it are on disk."""
        with destination_errors(self.path):
            for handle in (*self._folders.values(), self._handle):
                os.fsync(handle)

    def close(self) -> None:
        """Close the descriptors; it may be called more than once."""
        while self._folders:
            _, handle = self._folders.popitem()
            os.close(handle)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _locate(self, name: str) -> tuple[int, str]:
        """Find the descriptor of the folder that has a file, and the file's name there."""
        folder, _, file_name = name.rpartition("/")
        # Other folders are not of this output, and an empty name is the folder itself.
        if Path(file_name).name != file_name or folder not in {"", *self._folders}:
            raise build_not_ours_error(self.path / name)
        return self._folders.get(folder, self._handle), file_name

    def _require_own_file(self, name: str, status: os.stat_result) -> os.stat_result:
        # A second hard link would let a write change a file elsewhere.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != self._owner:
            raise build_not_ours_error(self.path / name)
        return status


def build_not_ours_error(path: Path) -> ResumeError:
    """Build the error for something in a partial folder that no run of quantkit leaves."""
    hint = "remove the partial folder and start again"
    return ResumeError("was not written by the interrupted run", path=path, hint=hint)


def build_occupied_error(path: Path) -> ResumeError:
    """Build the error for something else at the path of a partial folder."""
    hint = "choose another destination"
    return ResumeError(
        "already exists and is not an interrupted run of quantkit", path=path, hint=hint
    )
