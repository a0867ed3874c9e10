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
    OwnFolder,
    destination_error,
    destination_errors,
    not_ours,
)

NAME = ".quantkit-journal.jsonl"
WRITER = ".quantkit-writer"
"""The file with the process and the machine that locked the journal last."""
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
        """
        Raises:
            BeingWrittenError: if a job has it open.
            ResumeError: if a line is damaged.
            DestinationError: if it cannot be opened or locked.
        """
        self._path, self._file, self._check = folder.path / NAME, folder.open(NAME), ""
        self.entries: list[dict[str, Any]] = []
        try:
            if not _try_lock(self._file, self._path):
                raise in_use(_who_writes(folder))
            folder.write(WRITER, f"{os.getpid()} {os.uname().nodename}".encode())
            with destination_errors(self._path):
                self._file.truncate(self._read())
                self._file.seek(0, os.SEEK_END)
        except BaseException:
            self.close()
            raise

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line and wait until it is on disk."""
        text = json.dumps(entry)
        self._check = _compute_check(self._check, text)
        with destination_errors(self._path):
            self._file.write(
                json.dumps({**json.loads(text), "check": self._check}).encode() + b"\n"
            )
            self._file.flush()
            os.fsync(self._file.fileno())
        self.entries.append(json.loads(text))

    def close(self) -> None:
        """Close and unlock it."""
        # The rest of a line for which the disk had no space.
        with contextlib.suppress(OSError):
            self._file.close()

    def _read(self) -> int:
        """Read all complete lines; their size in bytes."""
        end = 0
        while (line := self._file.readline(_MAX_LINE)).endswith(b"\n"):
            try:
                entry = json.loads(line)
                check = entry.pop("check")
                self._check = _compute_check(self._check, json.dumps(entry))
            except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                raise not_ours(self._path) from error
            if check != self._check:
                raise not_ours(self._path)
            self.entries.append(entry)
            end += len(line)
        if len(line) == _MAX_LINE:
            raise not_ours(self._path)
        return end


def fingerprint_in(folder: Path) -> dict[str, Any]:
    """Return the inputs and options with which a folder's journal begins, without locking it; empty
    if there are none.
    """
    try:
        with (folder / NAME).open("rb") as file:
            entry = json.loads(file.readline(_MAX_LINE))
        check = entry.pop("check")
        result = entry["fingerprint"]
        if check == _compute_check("", json.dumps(entry)) and isinstance(result, dict):
            return result
        return {}
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):
        return {}


def being_written(folder: OwnFolder) -> str | None:
    """Return a sentence on the job that writes to a folder; None if none does.

    Raises:
        ResumeError: if the folder has no journal.
        DestinationError: if the system cannot say.
    """
    with folder.open(NAME, create=False) as file:
        if _try_lock(file, folder.path / NAME):
            return None
        return _who_writes(folder)


def in_use(problem: str) -> BeingWrittenError:
    """Return the error for a folder to which a job writes, from the sentence of `being_written`."""
    return BeingWrittenError(problem, hint="wait until it is done, or choose another destination")


def _who_writes(folder: OwnFolder) -> str:
    problem = f"another quantkit process is writing to {folder.path}"
    try:
        with folder.open(WRITER, create=False) as file:
            number, machine = file.read(_MAX_NAME).decode().split(" ", 1)
            pid = int(number)
    except (OSError, QuantkitError, ValueError):
        return problem
    here = os.uname().nodename
    if (pid, machine) == (os.getpid(), here):
        return f"this process is writing to {folder.path} already, in another call"
    if machine != here:
        if machine.isprintable():
            return f"{problem} (pid {pid} on {machine})"
        return problem
    if pid > 0 and _runs(pid):
        return f"{problem} (pid {pid})"
    return problem


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
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
        result = cls(**value)
        valid = (
            all(
                type(count) is int and count >= 0
                for count in (result.tensors, *result.files.values())
            )
            and result.tensors <= len(planned)
            and set(result.files) == set(result.sha256) <= set(files)
            and all(
                isinstance(digest, str) and _SHA256.fullmatch(digest)
                for digest in result.sha256.values()
            )
            and all(
                name in planned and isinstance(record, dict)
                for name, record in result.records.items()
            )
        )
        if not valid:
            raise ValueError("not a safe point")
        return result


def _compute_check(before: str, text: str) -> str:
    return hashlib.sha256((before + text).encode()).hexdigest()
