"""How jobs tell that they advance, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with the bytes done and in all, and the name of what is being worked on."""

    def __call__(self, done: int, total: int, name: str) -> None: ...


def silent(done: int, total: int, name: str) -> None:
    """Tell nobody."""
