"""A file of JSON lines that grows while a server runs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quantkit.errors import DestinationError

_log = logging.getLogger(__name__)


class LogFile:
    """Appends a line for each object.

    If that fails, one warning is logged, and the server continues.
    """

    def __init__(self, file: Path | int) -> None:
        """Open the file to append to it.

        Args:
            file: a path, which only its owner can read if it is new; or the descriptor of an open
                file.

        Raises:
            DestinationError: if the file cannot be opened.
        """
        self._failed = False
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            # A copy, so that closing it leaves the caller's descriptor open.
            if isinstance(file, int):
                self._file = os.dup(file)
            # With --log-prompts the file contains what users wrote.
            else:
                self._file = os.open(file, flags, 0o600)
        except OSError as error:
            path = None if isinstance(file, int) else file
            raise DestinationError(
                f"the log cannot be written: {error.strerror}", path=path
            ) from error

    def write(self, value: Mapping[str, Any]) -> None:
        """Append a line with a JSON object."""
        # `json.dumps` escapes all but printable ASCII, so text of clients neither begins another
        # line nor controls a terminal.
        line = json.dumps(value).encode() + b"\n"
        try:
            # A pipe may take a part of the line only.
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            if not self._failed:
                _log.warning("the log of requests cannot be written: %s", error.strerror)
            self._failed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)
