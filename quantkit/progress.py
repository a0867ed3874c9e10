"""How jobs tell that they advance, without knowing who listens."""

from __future__ import annotations

from typing import Protocol

from quantkit.arguments import wrong_type


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


def deduplicated(progress: Progress | None) -> Progress:
    """The one to tell, where callers may have given none: it hears only what is other than what it heard last.

    Raises:
        RequestError: if it cannot be called.
    """
    if progress is None:
        return silent
    if not callable(progress):
        raise wrong_type("progress", progress, "None, or a function of (phase, done, total, unit)")
    if progress is silent:
        return silent
    told: tuple[str, int, int, str] | None = None

    def report(phase: str, done: int, total: int, unit: str, /) -> None:
        nonlocal told
        now = (phase, done, total, unit)
        if now != told:
            told = now
            progress(*now)

    return report


def without_phase(progress: Progress, name: str) -> Progress:
    """Tell `progress` of everything but one phase, which somebody else tells it of more finely."""

    def report(phase: str, done: int, total: int, unit: str, /) -> None:
        if phase != name:
            progress(phase, done, total, unit)

    return report


def in_phase(progress: Progress, name: str) -> Progress:
    """Tell `progress` of everything as of one phase, as a job does that calls others as parts of its own."""

    def report(_phase: str, done: int, total: int, unit: str, /) -> None:
        progress(name, done, total, unit)

    return report
