"""Report the progress of jobs, without knowing who displays it."""

from __future__ import annotations

from typing import Protocol

from quantkit.base.arguments import wrong_type


class Progress(Protocol):
    """A callback for progress: the phase, how much of it is done, the total, and the unit.

    For instance ``("gate", 3, 24, "layers")``. The first call of a phase is often at 0; each phase
    has its own total.
    """

    def __call__(self, phase: str, done: int, total: int, unit: str, /) -> None:
        """Receive a report: in this phase of the job, `done` of `total` units, such as
        ``layers``, are done.
        """
        ...


class _Silent:
    def __call__(self, phase: str, done: int, total: int, unit: str, /) -> None:
        pass

    def __repr__(self) -> str:
        # Signatures in the help show defaults by their `repr`.
        return "silent"


silent: Progress = _Silent()
"""Reports to nobody."""


def skip_repeated_reports(progress: Progress | None) -> Progress:
    """Wrap a callback so that a report equal to the one before is skipped; `silent` for None.
    Raises `RequestError` if it is not callable.
    """
    if progress is None or progress is silent:
        return silent
    if not callable(progress):
        raise wrong_type("progress", progress, "None, or a function of (phase, done, total, unit)")
    last: tuple[str, int, int, str] | None = None

    def report(phase: str, done: int, total: int, unit: str, /) -> None:
        nonlocal last
        current = (phase, done, total, unit)
        if current != last:
            # Before the call, which may raise or report itself.
            last = current
            progress(*current)

    return report


def without_phase(progress: Progress, name: str) -> Progress:
    """Forward every phase but one, which is reported elsewhere in smaller steps."""

    def report(phase: str, done: int, total: int, unit: str, /) -> None:
        if phase != name:
            progress(phase, done, total, unit)

    return report


def in_phase(progress: Progress, name: str) -> Progress:
    """Forward everything under one phase, for a job that runs another as part of itself."""

    def report(_phase: str, done: int, total: int, unit: str, /) -> None:
        progress(name, done, total, unit)

    return report


class Stretches:
    """Divides the progress of a job into consecutive stretches, whose lengths are in units of the
    job.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        """
        Args:
            progress: gets the reports of all stretches.
            total: the length of the job.
        """
        self._progress = progress
        self._total = total
        self._start = 0

    def next(self, length: int) -> Progress:
        """Begin the stretch after the last one: a callback that gets reports as if it was a job
        of its own.
        """
        start = self._start
        self._start += length

        def report(phase: str, done: int, total: int, unit: str, /) -> None:
            # A stretch with nothing to do is complete at its first report.
            if total:
                passed = length * done // total
            else:
                passed = length
            self._progress(phase, start + passed, self._total, unit)

        return report
