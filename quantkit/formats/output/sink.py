"""Appending to files in the background: written, hashed, and durable at each sync."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.base.progress import Progress, silent
from quantkit.formats.output.destination import OwnFolder, build_not_ours_error, destination_errors

IN_FLIGHT_BYTES = 1 << 26
"""Bytes that may wait to be written at a time."""
_PIECE = 1 << 22
_FLUSH_BYTES = 1 << 26

Data = bytes | memoryview


@dataclass
class _Chunk:
    """Bytes for the end of a file, and how many workers still need them."""

    name: str
    data: Data
    users: int


_Queue = queue.SimpleQueue[_Chunk | None]


class Sink:
    """Files of one folder that only grow.

    ``append`` returns before the data is written; one thread writes and one hashes. The bytes that
    wait are limited, so the producer's memory stays bounded. The next call raises whatever fails in
    a thread, as it is; an error of the system as a `DestinationError`.
    """

    def __init__(
        self,
        folder: OwnFolder,
        sizes: Mapping[str, int],
        hashes: Mapping[str, str],
        *,
        progress: Progress = silent,
    ) -> None:
        """Open the files of an interrupted run at the given sizes, and drop all bytes after them.

        Args:
            sizes, hashes: the length of each, and its sha256 in hexadecimal.
            progress: called for each of these files.

        Raises:
            DestinationError: if a file cannot be opened.
            ResumeError: if the bytes of a file up to its size do not have the given sha256.
        """
        self._folder = folder
        self._sizes = dict(sizes)
        self._files: dict[str, _GrowingFile] = {}
        self._hashes: dict[str, Any] = {}
        self._waiting = 0
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._workers: list[tuple[_Queue, threading.Thread]] = []
        try:
            for index, (name, size) in enumerate(sizes.items()):
                progress("check of what is there", index, len(sizes), "files")
                self._files[name] = self._open(name, size)
                self._hashes[name] = self._files[name].hash(folder.path / name)
            for name, digest in self.hashes().items():
                if digest != hashes[name]:
                    raise build_not_ours_error(folder.path / name)
            # A queue each, so that writing and hashing overlap.
            for title, step in (("write", self._write), ("hash", self._hash)):
                chunks: _Queue = queue.SimpleQueue()
                thread = threading.Thread(
                    target=self._work, args=(chunks, step), name=f"quantkit-{title}", daemon=True
                )
                thread.start()
                self._workers.append((chunks, thread))
        except BaseException:
            self.abandon()
            raise

    def append(self, name: str, data: Data) -> None:
        """Queue bytes for the end of a file; they must not change until they are written."""
        size = len(data)
        with self._changed:
            # Data above the limit goes alone, once nothing else waits.
            while self._failure is None and self._waiting:
                if self._waiting + size <= IN_FLIGHT_BYTES:
                    break
                self._changed.wait()
            self._raise_failure()
            self._waiting += size
        self._sizes[name] = self._sizes.get(name, 0) + size
        chunk = _Chunk(name, data, len(self._workers))
        for chunks, _ in self._workers:
            chunks.put(chunk)

    def sync(self) -> dict[str, int]:
        """Wait until everything is on disk, and report the sizes of the files."""
        with self._changed:
            while self._failure is None and self._waiting:
                self._changed.wait()
            self._raise_failure()
        # Both threads are idle now, so the files can be used here.
        for name, file in self._files.items():
            with destination_errors(self._folder.path / name):
                file.flush()
        return dict(self._sizes)

    def hashes(self) -> dict[str, str]:
        """Report the sha256 of each file in hexadecimal; call it when synced."""
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def close(self) -> dict[str, str]:
        """Stop the threads, close the files, and report the sha256 of each in hexadecimal."""
        self.abandon()
        self._raise_failure()
        return self.hashes()

    def abandon(self) -> None:
        """Stop the threads and close the files, whatever has failed."""
        # The end of a queue comes after all chunks in it, which are written first.
        for chunks, thread in self._workers:
            chunks.put(None)
            thread.join()
        for file in self._files.values():
            file.close()

    def _open(self, name: str, size: int) -> _GrowingFile:
        """Open a file of a given size; one that should have bytes must exist."""
        with destination_errors(self._folder.path / name):
            # Without a buffer in Python, `fsync` is enough to make all data durable.
            file = self._folder.open(name, create=not size, buffering=0)
            return _GrowingFile(file, size)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self, chunks: _Queue, step: Callable[[_Chunk], None]) -> None:
        """Handle chunks in order.

        After a failure the thread goes on without work, since `append` waits for it.
        """
        while (chunk := chunks.get()) is not None:
            try:
                if self._failure is None:
                    step(chunk)
            except BaseException as error:
                self._failure = error
            # Also after a failure, or `append` and `sync` would wait for ever.
            with self._changed:
                chunk.users -= 1
                if chunk.users == 0:
                    self._waiting -= len(chunk.data)
                    # Free the memory before the producer goes on.
                    chunk.data = b""
                    self._changed.notify_all()

    def _write(self, chunk: _Chunk) -> None:
        # Only this thread adds files while the threads run.
        if chunk.name not in self._files:
            self._files[chunk.name] = self._open(chunk.name, 0)
        with destination_errors(self._folder.path / chunk.name):
            self._files[chunk.name].write(chunk.data)

    def _hash(self, chunk: _Chunk) -> None:
        digest = self._hashes.setdefault(chunk.name, hashlib.sha256())
        for piece in _split_pieces(chunk.data):
            digest.update(piece)


class _GrowingFile:
    """A file written at its end, and flushed often so that the page cache stays small."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        # Bytes after the last safe point have no sha256. That a file is too short shows in `hash`.
        if file.seek(0, os.SEEK_END) > size:
            file.truncate(size)
        self._position = self._flushed = size

    def hash(self, path: Path) -> Any:
        """Compute the sha256 so far; a `ResumeError` if the file is shorter than it should be."""
        with destination_errors(path):
            self._file.seek(0)
            digest = hashlib.sha256()
            while piece := self._file.read(_PIECE):
                digest.update(piece)
            if self._file.tell() != self._position:
                raise build_not_ours_error(path)
        return digest

    def write(self, data: Data) -> None:
        """Write data at the end, and flush it each time that `_FLUSH_BYTES` have come together."""
        self._file.seek(self._position)
        for piece in _split_pieces(data):
            # An unbuffered file may write fewer bytes than it gets.
            done = 0
            while done < len(piece):
                done += self._file.write(piece[done:])
            self._position += len(piece)
            if self._position - self._flushed >= _FLUSH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Wait until the data is on disk, and drop it from the page cache."""
        os.fsync(self._file.fileno())
        # macOS lacks it.
        if hasattr(os, "posix_fadvise"):
            # Only pages that are on disk can be dropped, so this follows `fsync`.
            os.posix_fadvise(self._file.fileno(), 0, self._position, os.POSIX_FADV_DONTNEED)
        self._flushed = self._position

    def close(self) -> None:
        # What must be on disk is synced before; an error here would hide the one that ends the job.
        with contextlib.suppress(OSError):
            self._file.close()


def _split_pieces(data: Data) -> list[memoryview]:
    """Split data into pieces without copying it."""
    view = memoryview(data)
    return [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]
