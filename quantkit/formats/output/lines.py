"""A file of JSON lines that appears only when it is complete, and can be resumed until then."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from quantkit.base.json_values import replace_non_finite
from quantkit.formats.output.destination import (
    SPACE_MARGIN,
    build_not_ours_error,
    destination_errors,
    place_output,
)
from quantkit.formats.output.staging import Staging, note_partial_output

NAME = "lines.jsonl"
"""In the partial folder: the lines so far in the order of `add`, each with its sha256 as
``check``.
"""
_ORDERED = "ordered.jsonl"
_MIN_SPACE = 64 << 10
# The check is appended to the object as its last key, in place of the closing brace.
_SEAL = b', "check": "%b"}\n'
_SEAL_BYTES = len(_SEAL % (b"0" * 64))


class ResumableLines:
    """Writes lines in groups; each group is written as a whole, in the end in the order of their
    numbers.

    In the context, `add` takes groups in any order, and `commit` gives the file its name. An error
    or an interruption keeps the groups so far in ``DST.partial``.

    Attributes:
        done: the numbers of the groups so far.
    """

    def __init__(
        self,
        dst: Path,
        fingerprint: Mapping[str, Any],
        sizes: Sequence[int],
        number_of: Callable[[Mapping[str, Any]], Any],
        *,
        likely_bytes: int,
        resume: bool,
    ) -> None:
        """Create the partial folder, or open that of an interrupted run, as `Staging` does.

        Args:
            sizes: the number of lines of each group.
            number_of: finds the number of a line's group.
            likely_bytes: of the whole file, which must be free on the disk, up to the margin of all
                outputs.
        """
        self._dst = dst
        self._sizes = sizes
        self._number_of = number_of
        self._starts: dict[int, int] = {}
        spare_bytes = min(max(likely_bytes, _MIN_SPACE), SPACE_MARGIN)
        self._staging = Staging(dst, fingerprint, 0, resume=resume, spare_bytes=spare_bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(self._staging.close)
            self._file = undo.enter_context(self._staging.folder.open(NAME))
            with destination_errors(self._staging.path / NAME):
                complete_bytes = self._read()
                self._file.truncate(complete_bytes)
                self._file.seek(0, os.SEEK_END)
            # From here on `__exit__` closes both.
            undo.pop_all()

    @property
    def done(self) -> set[int]:
        return set(self._starts)

    def __enter__(self) -> ResumableLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # By `commit`, which has removed the partial folder.
        if self._file.closed:
            return
        # Closing writes the rest of a line for which the disk had no space, and fails again.
        with contextlib.suppress(OSError):
            self._file.close()
        if not self._starts:
            self._staging.discard()
            return
        if error is not None:
            note_partial_output(error, self._staging.path)
        self._staging.close()

    def add(self, number: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add a group of lines of that number; a `DestinationError` if a write failed."""
        # A line that cannot be encoded must not leave part of its group in the file.
        content = b"".join(_add_seal(encode_line(line)) for line in lines)
        with destination_errors(self._staging.path / NAME):
            start = self._file.tell()
            self._file.write(content)
            self._file.flush()
        self._starts[number] = start

    def commit(self) -> None:
        """Write all groups in order, and give the file its name.

        Raises:
            DestinationError: if the name is in use by now, or a write failed.
            ResumeError: if a line is damaged.
        """
        assert self.done == set(range(len(self._sizes)))
        folder = self._staging.folder
        with destination_errors(self._staging.path / _ORDERED), folder.open(_ORDERED) as ordered:
            # An interrupted `commit` may have left one.
            ordered.truncate(0)
            for number in range(len(self._sizes)):
                self._file.seek(self._starts[number])
                for _ in range(self._sizes[number]):
                    sealed_line = self._file.readline()
                    ordered.write(self._remove_seal(sealed_line))
            ordered.flush()
            os.fsync(ordered.fileno())
        self._staging.require_in_place()
        place_output(self._staging.path / _ORDERED, self._dst)
        self._file.close()
        self._staging.discard()

    def _read(self) -> int:
        """Find the groups so far, and add up their size in bytes.

        An interruption may leave part of a group after them.
        """
        start = 0
        number = self._read_group_number()
        while number is not None:
            if number in self._starts or not 0 <= number < len(self._sizes):
                raise build_not_ours_error(self._staging.path / NAME)
            # All lines of the group are read first: an incomplete group is no damage.
            later_numbers = [self._read_group_number() for _ in range(self._sizes[number] - 1)]
            if None in later_numbers:
                break
            for later_number in later_numbers:
                if later_number != number:
                    raise build_not_ours_error(self._staging.path / NAME)
            self._starts[number] = start
            start = self._file.tell()
            number = self._read_group_number()
        return start

    def _read_group_number(self) -> int | None:
        """Read the number of the next line's group; None if no complete line follows."""
        line = self._file.readline()
        if not line.endswith(b"\n"):
            return None
        try:
            number = self._number_of(json.loads(self._remove_seal(line)))
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise build_not_ours_error(self._staging.path / NAME) from error
        # No group has the number -1, so the caller refuses the line.
        if type(number) is int:
            return number
        return -1

    def _remove_seal(self, line: bytes) -> bytes:
        """Verify a line's check, and remove it."""
        plain = line[:-_SEAL_BYTES] + b"}\n"
        if line != _add_seal(plain):
            raise build_not_ours_error(self._staging.path / NAME)
        return plain


def _add_seal(line: bytes) -> bytes:
    """Add the sha256 of a line to its JSON object, which must not be empty."""
    # Without the closing brace and the line end, which the seal has too.
    return line[:-2] + _SEAL % hashlib.sha256(line).hexdigest().encode()


def encode_line(value: Mapping[str, Any]) -> bytes:
    """Encode one line of JSON in UTF-8; NaN and Inf become null."""
    plain = replace_non_finite(value)
    try:
        return json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        # UTF-8 has no half of a surrogate pair, which a JSON escape can hold.
        return json.dumps(plain, allow_nan=False).encode() + b"\n"
