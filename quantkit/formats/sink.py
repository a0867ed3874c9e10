"""Appending to files in the background: written, hashed, and durable at each checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from pathlib import Path
from typing import IO, Any

from quantkit.errors import QuantkitError
from quantkit.formats.staging import destination_error

_IN_FLIGHT_BYTES = 1 << 27
_PIECE = 1 << 22


class Sink:
    """Files of one folder that only ever grow, fed from one thread.

    ``append`` returns before the data is written; at most a fixed number of bytes wait
    at a time, so the producer's memory stays bounded.
    """

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        """Take up files at the given sizes; anything beyond, and other files, is dropped.

        Raises:
            QuantkitError: if a file cannot be opened.
        """
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._hashes: dict[str, Any] = {}
        self._sizes = dict(sizes)
        self._queue: queue.SimpleQueue[tuple[str, bytes | memoryview] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._changed = threading.Condition()
        self._failure: QuantkitError | None = None
        for name in sizes:
            self._open(name)
        self._thread = threading.Thread(target=self._work, name="quantkit-sink", daemon=True)
        self._thread.start()

    def append(self, name: str, data: bytes | memoryview) -> None:
        """Queue bytes for the end of a file; they must not change until written.

        Raises:
            DestinationError: if an earlier write failed.
        """
        size = len(data)
        with self._changed:
            while self._failure is None and self._waiting and self._waiting + size > _IN_FLIGHT_BYTES:
                self._changed.wait()
            self._raise_failure()
            self._waiting += size
        self._queue.put((name, data))

    def sync(self) -> dict[str, int]:
        """Wait until everything is on disk; the sizes of the files.

        Raises:
            DestinationError: if a write failed.
        """
        with self._changed:
            while self._failure is None and self._waiting:
                self._changed.wait()
            self._raise_failure()
        try:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise destination_error(error, self._folder) from error
        return dict(self._sizes)

    def close(self) -> dict[str, str]:
        """Stop the thread and close the files; the sha256 of each, in hexadecimal."""
        self._queue.put(None)
        self._thread.join()
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _open(self, name: str) -> None:
        """Open a file at its known size and hash what is there."""
        digest = hashlib.sha256()
        size = self._sizes.setdefault(name, 0)
        try:
            file = (self._folder / name).open("r+b" if size else "wb")
            file.truncate(size)
            while piece := (file.read(_PIECE) if size else b""):
                digest.update(piece)
            file.seek(size)
        except OSError as error:
            raise destination_error(error, self._folder / name) from error
        self._files[name] = file
        self._hashes[name] = digest

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            name, data = item
            if self._failure is None:
                try:
                    self._write(name, data)
                except QuantkitError as error:
                    self._failure = error
                except OSError as error:
                    self._failure = destination_error(error, self._folder / name)
            size = len(data)
            del item, data  # the producer's memory is free before it is told so
            with self._changed:
                self._waiting -= size
                self._changed.notify_all()

    def _write(self, name: str, data: bytes | memoryview) -> None:
        if name not in self._files:
            self._open(name)
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._files[name].write(piece)
            self._hashes[name].update(piece)
        self._sizes[name] += len(view)
