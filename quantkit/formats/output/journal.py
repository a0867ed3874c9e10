"""The journal of an unfinished output: what is durably on disk, line by line, and which process
is writing it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.errors import BeingWrittenError, QuantkitError
from quantkit.formats.output.destination import (
    JOURNAL,
    WRITER,
    OwnFolder,
    build_not_ours_error,
    destination_error,
    destination_errors,
)

# A damaged file must not fill the memory with one line or name.
_MAX_LINE = 1 << 26
_MAX_NAME = 300
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Journal:
    """JSON objects, one per line, to which one process at a time can append.

    The ``check`` of each line is the sha256 of this line and the check before it, which shows
    damage. A last line without a line end is left by an interruption and is dropped.

    Attributes:
        entries: the objects.
    """

    def __init__(self, folder: OwnFolder) -> None:
        """Open and lock the journal, and read its lines.

        Raises:
            BeingWrittenError: if a job has it open.
            ResumeError: if a line is damaged.
            DestinationError: if it cannot be opened or locked.
        """
        self._path = folder.path / JOURNAL
        self._file = folder.open(JOURNAL)
        self._check = ""
        self.entries: list[dict[str, Any]] = []
        try:
            if not _try_lock(self._file, self._path):
                raise build_in_use_error(_who_writes(folder))
            # A file of its own, since a lock does not tell whose it is, least of all on another
            # machine.
            folder.write(WRITER, f"{os.getpid()} {os.uname().nodename}".encode())
            with destination_errors(self._path):
                complete_bytes = self._read()
                self._file.truncate(complete_bytes)
                self._file.seek(0, os.SEEK_END)
        # The lock would remain until the file is collected.
        except BaseException:
            self.close()
            raise

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line and wait until it is on disk."""
        # The check is of the JSON that a reader gets: tuples become lists, and keys strings.
        text = json.dumps(entry)
        self._check = _compute_check(self._check, text)
        checked_entry = {**json.loads(text), "check": self._check}
        with destination_errors(self._path):
            self._file.write(json.dumps(checked_entry).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self.entries.append(json.loads(text))

    def close(self) -> None:
        """Close and unlock it."""
        # Closing writes the rest of a line for which the disk had no space, and fails again.
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> int:
        """Read all complete lines, and add up their size in bytes."""
        end = 0
        line = self._file.readline(_MAX_LINE)
        while line.endswith(b"\n"):
            try:
                entry = json.loads(line)
                check = entry.pop("check")
                self._check = _compute_check(self._check, json.dumps(entry))
            except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                raise build_not_ours_error(self._path) from error
            if check != self._check:
                raise build_not_ours_error(self._path)
            self.entries.append(entry)
            end += len(line)
            line = self._file.readline(_MAX_LINE)
        # An interruption can leave part of a line, but no run writes one of this length.
        if len(line) == _MAX_LINE:
            raise build_not_ours_error(self._path)
        return end


def read_fingerprint(folder: Path) -> dict[str, Any]:
    """Read the inputs and options with which a folder's journal begins, without locking it; empty
    if there are none.
    """
    try:
        with (folder / JOURNAL).open("rb") as file:
            entry = json.loads(file.readline(_MAX_LINE))
        check = entry.pop("check")
        fingerprint = entry["fingerprint"]
        is_intact = check == _compute_check("", json.dumps(entry))
        if is_intact and isinstance(fingerprint, dict):
            return fingerprint
        return {}
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):
        return {}


def describe_writer(folder: OwnFolder) -> str | None:
    """Describe the job that writes to a folder in a sentence; None if none does.

    Raises:
        ResumeError: if the folder has no journal.
        DestinationError: if the system cannot say.
    """
    # Closing the file releases the lock.
    with folder.open(JOURNAL, create=False) as file:
        if _try_lock(file, folder.path / JOURNAL):
            return None
        return _who_writes(folder)


def build_in_use_error(problem: str) -> BeingWrittenError:
    """Build the error for a folder to which a job writes, from the sentence of
    `describe_writer`.
    """
    return BeingWrittenError(problem, hint="wait until it is done, or choose another destination")


def _who_writes(folder: OwnFolder) -> str:
    """Describe the process that locked the journal, as far as the file of the writer tells."""
    problem = f"another quantkit process is writing to {folder.path}"
    try:
        with folder.open(WRITER, create=False) as file:
            number, machine = file.read(_MAX_NAME).decode().split(" ", 1)
            pid = int(number)
    # The process that has the lock may not have written the file yet.
    except (OSError, QuantkitError, ValueError):
        return problem
    this_machine = os.uname().nodename
    if (pid, machine) == (os.getpid(), this_machine):
        return f"this process is writing to {folder.path} already, in another call"
    # The process id tells nothing about processes of this machine then.
    if machine != this_machine:
        # The file may be damaged, and its content is printed on a terminal.
        if machine.isprintable():
            return f"{problem} (pid {pid} on {machine})"
        return problem
    # `os.kill` takes 0 and negative numbers for groups of processes.
    if pid > 0 and _runs(pid):
        return f"{problem} (pid {pid})"
    return problem


def _runs(pid: int) -> bool:
    """Look for a process with this number, of any user."""
    try:
        # Signal 0 only checks that the process exists.
        os.kill(pid, 0)
    # Another user's process.
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _try_lock(file: BinaryIO, path: Path) -> bool:
    """Lock a file, unless another process has; a `DestinationError` if the file system has no
    locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise destination_error(error, path) from error
    return True


@dataclass(frozen=True)
class SafePoint:
    """An entry of the journal: how much of an output is durably on disk.

    Attributes:
        tensors: the number of planned tensors.
        files: the size of each file.
        sha256: of each file, in hexadecimal.
        state: from which the encoder continues.
        records: the manifest's records of the tensors since the last safe point, by name.
    """

    tensors: int
    files: dict[str, int]
    sha256: dict[str, str]
    state: Any
    records: dict[str, dict[str, Any]]

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], planned: Collection[str], files: Collection[str]
    ) -> SafePoint:
        """Read what `asdict` returned.

        Args:
            planned, files: the names of the tensors of the output, and of its files of weights.

        Raises:
            AttributeError, TypeError, ValueError: if it has another form, or names other tensors or
                files.
        """
        point = cls(**value)
        if not point._is_valid(planned, files):
            raise ValueError("not a safe point")
        return point

    def _is_valid(self, planned: Collection[str], files: Collection[str]) -> bool:
        for count in (self.tensors, *self.files.values()):
            # A boolean is an instance of `int`.
            if type(count) is not int or count < 0:
                return False
        if self.tensors > len(planned):
            return False
        if not set(self.files) == set(self.sha256) <= set(files):
            return False
        for digest in self.sha256.values():
            if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
                return False
        for name, record in self.records.items():
            if name not in planned or not isinstance(record, dict):
                return False
        return True


def _compute_check(before: str, text: str) -> str:
    return hashlib.sha256((before + text).encode()).hexdigest()
