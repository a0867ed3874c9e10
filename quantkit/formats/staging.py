"""The folder an output is built in before it takes its final name.

``DST.partial`` lies beside ``DST``; a journal in it says what is safely on disk, so
that a killed run can go on. Only a complete output is renamed to ``DST``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import DestinationError, ResumeError

_JOURNAL = ".quantkit-journal.jsonl"
_SPACE_MARGIN = 16 << 20


class Staging:
    """An output folder under construction, locked against a second writer."""

    def __init__(self, dst: Path, fingerprint: Mapping[str, Any], needed_bytes: int, *, resume: bool) -> None:
        """Create the partial folder, or take up an interrupted one.

        Args:
            dst: the final folder; it must not exist.
            fingerprint: inputs and options, JSON; a resumed run must have the same.
            needed_bytes: size of the whole output.
            resume: go on where an interrupted run stopped, if there is one.

        Raises:
            DestinationError: if `dst` exists, cannot be written or has too little space.
            ResumeError: if an interrupted run is there and `resume` is not set, or it
                had other inputs or options, or is still running.
        """
        self.dst = dst
        self.path = partial_folder(dst)
        self.entries: list[dict[str, Any]] = []
        require_absent(dst)
        interrupted = self.path.exists()
        require_room_to_build(self.path, resume=resume)
        with _destination_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            written = sum(f.stat().st_size for f in self.path.iterdir() if f.is_file())
        try:
            require_space(self.path, needed_bytes - written)
        except DestinationError:
            if not interrupted:
                self.path.rmdir()
            raise
        with _destination_errors(self.path):
            self._journal = (self.path / _JOURNAL).open("a+b")
        self._lock()
        self._read_journal(dict(fingerprint))

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one line to the journal and wait until it is on disk."""
        with _destination_errors(self.path):
            self._journal.write(json.dumps(entry).encode() + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self.entries.append(dict(entry))

    def write_file(self, name: str, content: bytes | Path) -> None:
        """Write or copy one small file and wait until it is on disk."""
        with _destination_errors(self.path), (self.path / name).open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.read_bytes())
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Give the finished folder its final name.

        Raises:
            DestinationError: if that name has been taken meanwhile.
        """
        with _destination_errors(self.dst):
            (self.path / _JOURNAL).unlink()
            _sync_folder(self.path)
            if self.dst.exists():
                raise DestinationError("appeared while writing; nothing is overwritten", path=self.dst)
            os.rename(self.path, self.dst)
            _sync_folder(self.dst.parent)
        self.close()

    def close(self) -> None:
        """Release the lock; the partial folder stays for a later resume."""
        self._journal.close()

    def discard(self) -> None:
        """Remove the partial folder: what failed would fail again."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._journal.close()
            raise ResumeError("another quantkit process is writing there", path=self.path) from error

    def _read_journal(self, fingerprint: dict[str, Any]) -> None:
        self._journal.seek(0)
        lines = []
        end = 0
        for line in self._journal:
            if not line.endswith(b"\n"):
                break  # torn by the interruption
            lines.append(json.loads(line))
            end += len(line)
        self._journal.truncate(end)
        self._journal.seek(0, os.SEEK_END)
        if not lines:
            self.record({"fingerprint": fingerprint})
            self.entries.clear()
            return
        before = lines[0]["fingerprint"]
        if before != json.loads(json.dumps(fingerprint)):
            changed = sorted(k for k in {*before, *fingerprint} if before.get(k) != fingerprint.get(k))
            self.close()
            raise ResumeError(
                "the interrupted run had other inputs or options", path=self.path,
                found=f"changed {', '.join(changed)}", hint="repeat its command, or remove the folder and start anew",
            )  # fmt: skip
        self.entries = lines[1:]


def require_absent(dst: Path) -> None:
    """Refuse a destination that is there.

    Raises:
        DestinationError: if it is.
    """
    if dst.exists() or dst.is_symlink():
        raise DestinationError(
            "exists already; nothing is overwritten", path=dst, hint="choose another name or remove it"
        )


def require_room_to_build(partial: Path, *, resume: bool) -> None:
    """Refuse a partial folder that is there, unless an interrupted run left it and is to go on.

    Raises:
        ResumeError: if it is.
    """
    if partial.is_dir() and any(partial.iterdir()) and not (partial / _JOURNAL).is_file():
        raise ResumeError(
            "is in the way, and no interrupted run of quantkit", path=partial, hint="choose another destination"
        )
    if partial.exists() and not resume:
        raise ResumeError(
            "an interrupted run is there", path=partial, hint="add --resume to go on with it, or remove it"
        )


def require_space(folder: Path, needed_bytes: int) -> None:
    """Refuse a disk that is too full; `folder` need not be there yet.

    Raises:
        DestinationError: if less is free than needed, with a little to spare.
    """
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    with _destination_errors(folder):
        free = shutil.disk_usage(there).free
    if free < needed_bytes + _SPACE_MARGIN:
        raise DestinationError(
            "too little space on the disk", path=folder.parent, found=f"{free / 1e9:.2f} GB free",
            expected=f"{(needed_bytes + _SPACE_MARGIN) / 1e9:.2f} GB",
        )  # fmt: skip


def partial_folder(dst: Path) -> Path:
    """Where an output is built."""
    return dst.with_name(dst.name + ".partial")


@contextlib.contextmanager
def _destination_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusals into one-line errors."""
    try:
        yield
    except OSError as error:
        raise destination_error(error, path) from error


def destination_error(error: OSError, path: Path) -> DestinationError:
    """The typed form of a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DestinationError(
            "the disk is full", path=path, hint="free some space and repeat the command with --resume"
        )
    return DestinationError(f"cannot be written: {error.strerror or error}", path=path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
