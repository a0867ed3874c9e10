"""The journal of an output under construction: what is safely on disk, line by line."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from quantkit.errors import ResumeError
from quantkit.formats.output.destination import destination_errors
from quantkit.formats.output.own_folder import OwnFolder, not_ours

NAME = ".quantkit-journal.jsonl"
_LONGEST_LINE = 1 << 26
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
            ResumeError: if another process has it open, or a line is not as it was written.
            DestinationError: if it cannot be opened.
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
        if not _locked(self._file):
            raise being_written(folder)

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


def require_idle(folder: OwnFolder) -> None:
    """Refuse a folder whose journal another process holds.

    Raises:
        ResumeError: if one does.
    """
    with folder.open(NAME, create=False) as file:
        if not _locked(file):
            raise being_written(folder)


def being_written(folder: OwnFolder) -> ResumeError:
    return ResumeError("another quantkit process is writing there", path=folder.path, hint="wait until it is done")


def _locked(file: BinaryIO) -> bool:
    """Lock a file, unless another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
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
        if not (set(sizes) == set(hashes) and set(sizes) <= set(files) and set(records) <= set(planned)):
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
