"""The standard streams of the process."""

from __future__ import annotations

import os
import sys

missing_streams: set[int] = set()
"""Numbers of the standard streams that were closed when the process began."""


def open_missing_streams() -> None:
    """Connect standard streams that were closed when the process began to /dev/null: files opened
    later, by imports too, would get their numbers, and the output meant for the terminal.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            missing_streams.add(number)
            # POSIX returns the lowest number that is free, which is the closed stream's.
            os.open(os.devnull, os.O_RDWR)
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for number, (name, mode) in enumerate(modes.items()):
        # Python sets a stream to None if its number was closed.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
