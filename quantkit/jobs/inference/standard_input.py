"""Read a file that the user names, or stdin."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import RequestError

STDIN = "-"
"""The name of stdin, and of stdout for results."""


def read_input(file: str | Path, description: str) -> bytes:
    """Read the content of a file, or of stdin for ``-``.

    Args:
        description: of the content, for the error.

    Raises:
        RequestError: if it cannot be read.
    """
    name = str(file)
    try:
        # Descriptor 0 is stdin, which stays open for others.
        is_stdin = name == STDIN
        with open(0 if is_stdin else file, "rb", closefd=not is_stdin) as source:
            return source.read()
    except OSError as error:
        raise RequestError(
            f"the {description} cannot be read: {error.strerror}", path=name
        ) from error
