"""The journal of an output under construction: what is safely on disk, line by line, and who is writing it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.errors import BeingWrittenError, QuantkitError
from quantkit.formats.output.destination import destination_error, destination_errors
from quantkit.formats.output.own_folder import OwnFolder, not_ours

NAME = ".quantkit-journal.jsonl"
WRITER = ".quantkit-writer"
"""Beside the journal: process and machine of whoever locked it last."""
_LONGEST_LINE = 1 << 26
_LONGEST_NAME = 300
_HEX = frozenset("0123456789abcdef")


class Journal:
    """Objects in JSON, a line for each, that one process at a time may append to.

    Each line holds under ``check`` the sha256 of itself and all before it, so that damage is
    told from what was written. A last line without an end was torn by an interruption and is dropped.

    Attributes:
        entries: what the lines say.
    """

    def __init__(self, folder: OwnFolder) -> None:
        """
        Raises:
            BeingWrittenError: if a job has it open.
            ResumeError: if a line is not as it was written.
            DestinationError: if it cannot be opened or locked.
        """
        self._path = folder.path / NAME
        self._file = folder.open(NAME)
        self._check = ""
        self.entries: list[dict[str, Any]] = []
        try:
            self._lock(folder)
            with destination_errors(self._path):
                self._file.truncate(self._read())
                self._file.seek(0, os.SEEK_END)
        except BaseException:
            self.close()
            raise

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line and wait until it is on disk."""
        text = json.dumps(entry)
        self._check = _sealed(self._check, text)
        with destination_errors(self._path):
            self._file.write(json.dumps({**json.loads(text), "check": self._check}).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self.entries.append(json.loads(text))

    def close(self) -> None:
        """Let another process have it."""
        with contextlib.suppress(OSError):  # what is left of a line that the disk had no room for
            self._file.close()

    def _lock(self, folder: OwnFolder) -> None:
        if not _locked(self._file, self._path):
            raise _in_use(_told(folder))
        folder.write(WRITER, f"{os.getpid()} {os.uname().nodename}".encode())

    def _read(self) -> int:
        """Take up what the lines say; how many bytes they are."""
        end = 0
        while (line := self._file.readline(_LONGEST_LINE)).endswith(b"\n"):
            try:
                entry = json.loads(line)
                check = entry.pop("check")
                self._check = _sealed(self._check, json.dumps(entry))
            except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                raise not_ours(self._path) from error
            if check != self._check:
                raise not_ours(self._path)
            self.entries.append(entry)
            end += len(line)
        if len(line) == _LONGEST_LINE:
            raise not_ours(self._path)
        return end


def first_entry(folder: Path) -> dict[str, Any]:
    """What the first line of a folder's journal says, for whoever must know it before the journal is opened; nothing
    where there is none, or not as it was written."""
    try:
        with (folder / NAME).open("rb") as file:
            entry = json.loads(file.readline(_LONGEST_LINE))
        check = entry.pop("check")
        return entry if check == _sealed("", json.dumps(entry)) else {}
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):
        return {}


def require_idle(folder: OwnFolder) -> None:
    """Refuse a folder whose journal a job holds.

    Raises:
        BeingWrittenError: if one does.
        ResumeError: if the folder has no journal.
        DestinationError: if that cannot be told.
    """
    if told := being_written(folder):
        raise _in_use(told)


def being_written(folder: OwnFolder) -> str | None:
    """That a job holds a folder's journal, in words; None if none does.

    Raises:
        ResumeError: if the folder has no journal.
        DestinationError: if that cannot be told.
    """
    with folder.open(NAME, create=False) as file:
        return None if _locked(file, folder.path / NAME) else _told(folder)


def _in_use(told: str) -> BeingWrittenError:
    return BeingWrittenError(told, hint="wait until it is done, or choose another destination")


def _told(folder: OwnFolder) -> str:
    writer = _writer(folder)
    if writer == (os.getpid(), os.uname().nodename):
        return f"this process is writing to {folder.path} already, in another call"
    return f"another quantkit process is writing to {folder.path}{_named(writer)}"


def _writer(folder: OwnFolder) -> tuple[int, str] | None:
    """The process that has locked a folder's journal, and its machine; None where it has not said so yet."""
    try:
        with folder.open(WRITER, create=False) as file:
            number, machine = file.read(_LONGEST_NAME).decode().split(" ", 1)
            return int(number), machine
    except (OSError, QuantkitError, ValueError):
        return None


def _named(writer: tuple[int, str] | None) -> str:
    """A process in brackets; nothing if it cannot be the one."""
    if writer is None:
        return ""
    pid, machine = writer
    if machine != os.uname().nodename:
        return f" (pid {pid} on {machine})" if machine.isprintable() else ""
    return f" (pid {pid})" if pid > 0 and _runs(pid) else ""


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except (OSError, OverflowError):
        return False
    return True


def _locked(file: BinaryIO, path: Path) -> bool:
    """Lock a file, unless another process has.

    Raises:
        DestinationError: if the file system has no locks.
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
    """How far an output is durably on disk, as one line of the journal says it.

    Attributes:
        tensors: how many of the planned ones.
        files: their sizes.
        sha256: of these files, in hexadecimal.
        state: what the encoder needs to go on.
        records: what the manifest shall say of tensors since the last safe point, by name.
    """

    tensors: int
    files: dict[str, int]
    sha256: dict[str, str]
    state: Any
    records: dict[str, dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], planned: Collection[str], files: Collection[str]) -> SafePoint:
        """What `to_json` gave.

        Args:
            value: the JSON.
            planned: the names of the tensors of the output.
            files: the names of the files they go to.

        Raises:
            ValueError: if it is of another form, or tells of other tensors or files.
        """
        if set(value) != {"tensors", "files", "sha256", "state", "records"}:
            raise ValueError("other keys")
        sizes, hashes, records = value["files"], value["sha256"], value["records"]
        if not (isinstance(sizes, dict) and isinstance(hashes, dict) and isinstance(records, dict)):
            raise ValueError("no objects")
        if not _is_count(value["tensors"]) or value["tensors"] > len(planned):
            raise ValueError("no number of tensors")
        if not (set(sizes) == set(hashes) and set(sizes) <= set(files) and all(name in planned for name in records)):
            raise ValueError("other names")
        if not (all(map(_is_count, sizes.values())) and all(map(_is_sha256, hashes.values()))):
            raise ValueError("no sizes or hashes")
        if not all(isinstance(record, dict) for record in records.values()):
            raise ValueError("a record is no object")
        return cls(value["tensors"], sizes, hashes, value["state"], records)


def _sealed(before: str, text: str) -> str:
    return hashlib.sha256((before + text).encode()).hexdigest()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= _HEX
