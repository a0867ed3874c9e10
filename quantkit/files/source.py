"""Open a file of a source once, read it by position, and check it for changes.

A memory-mapped file would kill the process without a message if it was truncated.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.base.json_values import LFS_POINTER
from quantkit.errors import CheckpointError

_PIECE = 1 << 22
# `SourceFile.identity` hashes this many samples of this size.
_SAMPLES = 64
SAMPLE_BYTES = 1 << 14
# A single read of more than 2 GiB is an error on some systems.
_MAX_READ = 1 << 30
_HTML = (b"<!doctype html", b"<html", b"<?xml", b"<head")


@dataclass(frozen=True)
class Checksum:
    """The CRC-32 of a range of a file, with a name for errors."""

    name: str
    start: int
    stop: int
    crc: int


class SourceFile:
    """A regular file. Every read raises a `CheckpointError` if the file is too short, or cannot be
    read.

    Attributes:
        size: in bytes, when it was opened.
        checksums: of ranges in ascending order that do not overlap; `sha256` checks them.
    """

    def __init__(self, path: Path) -> None:
        """Raise a `CheckpointError` if it is missing, is not a regular file, or cannot be
        opened.
        """
        self.path = path
        try:
            # Opening a FIFO must not block.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(path, error) from error
        # Before anything below raises.
        weakref.finalize(self, os.close, self._descriptor)
        # Of the open file: the path may lead to another file by now.
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("is not a regular file", path=path)
        self.size = status.st_size
        self._modified = status.st_mtime_ns
        self.checksums: Sequence[Checksum] = ()

    def identity(self) -> tuple[str, int, int, str]:
        """Collect name, size, modification time when it was opened, and the sha256 of samples of
        its content: enough to distinguish it from another file, though not to find a few changed
        bytes.
        """
        digest = hashlib.sha256()
        step = max(self.size // _SAMPLES, 1)
        for start in range(0, self.size, step):
            digest.update(self.read(start, min(SAMPLE_BYTES, step, self.size - start)))
        return self.path.name, self.size, self._modified, digest.hexdigest()

    def require_unchanged(self) -> None:
        """Raise a `CheckpointError` if the path now leads to another file, or to none."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise CheckpointError(
                f"the source changed while it was read: {error.strerror}", path=self.path
            ) from error
        if (status.st_size, status.st_mtime_ns) != (self.size, self._modified):
            raise CheckpointError("the source changed while it was read", path=self.path)

    def read(self, start: int, count: int) -> bytes:
        """Read `count` bytes."""
        data = bytearray(count)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill a buffer of bytes."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done : done + _MAX_READ]], start + done)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            # The end of the file.
            if count == 0:
                current_size = os.fstat(self._descriptor).st_size
                raise CheckpointError(
                    "was truncated while it was read",
                    path=self.path,
                    found=f"{current_size} bytes",
                    expected=f"{self.size} bytes",
                )
            done += count

    def stream(self) -> io.BufferedReader:
        """Open the file as a stream with its own position."""
        return io.BufferedReader(_Stream(self))

    def sha256(self) -> str:
        """Compute the sha256 in hexadecimal, in one pass over the file; a `CheckpointError` if a
        CRC-32 is wrong.
        """
        digest = hashlib.sha256()
        position = 0
        # The empty range at the end makes the loop also hash what follows the last checksum.
        for expected in (*self.checksums, Checksum("", self.size, self.size, 0)):
            for piece in self._pieces(position, expected.start):
                digest.update(piece)
            crc = 0
            for piece in self._pieces(expected.start, expected.stop):
                digest.update(piece)
                crc = zlib.crc32(piece, crc)
            if crc != expected.crc:
                raise make_damaged_file_error(
                    f"record '{expected.name}' is damaged",
                    self.path,
                    f"CRC-32 {crc:08x}",
                    f"{expected.crc:08x}",
                )
            position = expected.stop
        return digest.hexdigest()

    def git_blob_id(self) -> str:
        """Compute the hash by which git names its content, in hexadecimal; see git hash-object."""
        # git hashes this header before the content. Systems in FIPS mode refuse SHA-1 for security.
        header = b"blob %d\0" % self.size
        with self.stream() as stream:
            digest = hashlib.file_digest(
                stream, lambda: hashlib.sha1(header, usedforsecurity=False)
            )
        return digest.hexdigest()

    def require_content(self) -> None:
        """Raise a `CheckpointError` if it is a git-lfs pointer to a file."""
        if self.read(0, min(self.size, len(LFS_POINTER))) == LFS_POINTER:
            raise CheckpointError(
                "is a git-lfs pointer, not the file",
                path=self.path,
                found=f"{self.size} bytes",
                hint="run 'git lfs pull'",
            )

    def _pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield a range in pieces, all in the same buffer."""
        buffer = memoryview(bytearray(max(min(_PIECE, stop - start), 0)))
        for position in range(start, stop, _PIECE):
            piece = buffer[: stop - position]
            self.read_into(position, piece)
            yield piece


def open_weights(path: Path) -> SourceFile:
    """Open a file of weights, and reject placeholders.

    Raises:
        CheckpointError: for a missing, empty or irregular file, a git-lfs pointer, or an HTML or
            JSON error page.
    """
    if not os.path.exists(path):
        raise make_damaged_file_error("the weight file is missing", path)
    file = SourceFile(path)
    head = file.read(0, min(file.size, 512))
    size_text = f"{file.size} bytes"
    if not head:
        raise CheckpointError("the weight file is empty", path=path, found=size_text)
    if head.startswith(LFS_POINTER):
        raise CheckpointError(
            "is a git-lfs pointer, not weights",
            path=path,
            found=size_text,
            hint="run 'git lfs pull'",
        )
    # A download without access to a model may save the answer of the server as the file.
    text = head.lstrip().lower()
    if text.startswith(_HTML):
        hint = "the download failed; log in or accept the licence, and download again"
        raise CheckpointError("is an HTML page, not weights", path=path, found=size_text, hint=hint)
    if text.startswith(
        (b'{"error', b'{"message', b'{"detail', b"invalid username", b"access to model")
    ):
        problem = "is an error message of a server, not weights"
        raise make_damaged_file_error(problem, path, size_text)
    return file


def make_damaged_file_error(
    problem: str, path: Path, found: object = None, expected: object = None
) -> CheckpointError:
    """Build the error for a file that is missing, incomplete or damaged."""
    return CheckpointError(
        problem, path=path, found=found, expected=expected, hint="download it again"
    )


def require_adjacent(name: str, offset: int, expected: int, path: Path) -> None:
    """Raise a `CheckpointError` if a tensor does not begin where the one before it ends."""
    if offset != expected:
        if offset < expected:
            problem = "overlaps another tensor"
        else:
            problem = "is preceded by a gap"
        raise CheckpointError(
            f"tensor '{name}' {problem}", path=path, found=f"offset {offset}", expected=expected
        )


class _Stream(io.RawIOBase):
    """A source file with a position."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}
        position = offset + bases[whence]
        # As for any file, a position after the end is valid.
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = position
        return position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        target = memoryview(buffer)[: max(self._file.size - self._position, 0)]
        self._file.read_into(self._position, target)
        self._position += len(target)
        return len(target)


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError("the file is missing", path=path)
    return CheckpointError(f"cannot be read: {error.strerror}", path=path)
