"""How jobs tell that they advance, without knowing who listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called as a job advances: what it is at, how much of that is done, of how much, and what is counted.

    For instance ``("gate", 3, 24, "layers")``. A phase begins with a call of its name, often at 0, and its total
    may be another than that of the phase before.
    """

    def __call__(self, phase: str, done: int, total: int, unit: str, /) -> None:
        """Be told.

        Args:
            phase: what the job is at.
            done: how much of that is done.
            total: of how much.
            unit: what is counted, such as ``layers``.
        """
        ...


class _Silent:
    def __call__(self, phase: str, done: int, total: int, unit: str, /) -> None:
        pass

    def __repr__(self) -> str:
        return "silent"  # in signatures, whose default it is


silent: Progress = _Silent()
"""Tells nobody."""


def in_phase(progress: Progress, name: str) -> Progress:
    """Tell `progress` of everything as of one phase, as a job does that calls others as parts of its own."""

    def report(_phase: str, done: int, total: int, unit: str, /) -> None:
        progress(name, done, total, unit)

    return report
