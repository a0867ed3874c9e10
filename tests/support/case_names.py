"""Cases that one test goes through in a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Name a case in whatever its block raises, so that a failure says which case it is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(repr, values))[:500]}")
        raise
