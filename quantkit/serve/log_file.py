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

    If that fails, a warning says so once, and the server goes on.
    """

    def __init__(self, file: Path | int) -> None:
        """
        Args:
            file: a path, which only its owner can read if it is new; or the descriptor of an open
                file.

        Raises:
            DestinationError: if the file cannot be opened.
        """
        self._failed = False
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            if isinstance(file, int):
                self._file = os.dup(file)
            else:
                self._file = os.open(file, flags, 0o600)
        except OSError as error:
            path = None if isinstance(file, int) else file
            raise DestinationError(
                f"the log cannot be written: {error.strerror}", path=path
            ) from error

    def write(self, value: Mapping[str, Any]) -> None:
        """Append a line. What clients have sent is escaped and ASCII, so it neither begins another
        line nor drives a terminal.
        """
        line = json.dumps(value).encode() + b"\n"
        try:
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
