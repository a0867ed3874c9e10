"""The progress of jobs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Never

import click

from quantkit.base.late import LateModule
from quantkit.cli.output import DEFAULT_COLUMNS, terminal_columns
from quantkit.cli.signals import raise_if_interrupted

if TYPE_CHECKING:
    from tqdm import tqdm

    from quantkit.cli import job_steps
else:
    job_steps = LateModule("quantkit.cli.job_steps")

_LINE_SECONDS = 30.0
_TICK_SECONDS = 1.0
_DRAW_SECONDS = 0.1
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {unit}{postfix}"


@dataclass
class _Phase:
    """The progress of a phase: `first` was done when it began, and `done` since the last change."""

    name: str
    total: int
    unit: str
    first: int
    began: float
    done: int
    since: float

    def estimate_remaining_seconds(self, now: float) -> float | None:
        """Estimate the seconds left at the rate so far; None if the rate is not known yet."""
        # A resumed job begins with a part of the work done, which says nothing about the rate.
        progressed = self.done - self.first
        # The time since the last change belongs to work that is not reported yet.
        measured = self.since - self.began
        if progressed <= 0 or measured <= 0 or self.done >= self.total:
            return None
        return (self.total - self.done) * measured / progressed - (now - self.since)

    @property
    def share(self) -> float:
        """Return the share of the phase that is done; all of it if there is nothing to do."""
        if self.total:
            return self.done / self.total
        return 1.0

    def count(self) -> str:
        """Format how much is done, such as ``3/32 blocks``."""
        return f"{self.done}/{self.total} {self.unit}"


class ProgressDisplay:
    """Shows the progress of jobs while the context lasts.

    On a terminal it is a bar with the name of the phase, how much of it is done and the time left;
    it disappears when the context ends. Elsewhere a line is printed when a phase begins, and then
    every 30 seconds. If the steps of a job are `expected`, bar and time left are those of the whole
    job.
    """

    def __init__(
        self,
        *,
        show: bool = True,
        clock: Callable[[], float] = time.monotonic,
        ticking: bool = True,
        details: Callable[[], str | None] = lambda: None,
    ) -> None:
        """
        Args:
            show: if unset, shows nothing; in a group of processes only rank 0 shows its progress.
            details: returns what else is shown, such as a speed.
            clock: the time in seconds.
            ticking: call `tick` every second, from a thread.
        """
        self._silent = not show
        self._clock = clock
        self._details = details
        self._ticking = ticking and show
        self._phase: _Phase | None = None
        self._steps: job_steps.JobSteps | None = None
        self._shown_at = 0.0
        # Other code may redirect it for a while.
        self._stream = sys.stderr
        self._bar: tqdm[Never] | None = None
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick_on, name="quantkit-progress", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        raise_if_interrupted()
        if self._ticking:
            self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        # The thread may be drawing the bar.
        with self._writing():
            # Before the lock is free: the thread may wait for it, to show the progress once more.
            self._silent = True
            if self._bar is not None:
                self._bar.close()

    def expect(self, steps: Mapping[str, float]) -> None:
        """Show the progress of a whole job from here, by the estimated seconds of its phases, in
        order.
        """
        if steps:
            self._steps = job_steps.JobSteps(steps, self._clock())
        else:
            self._steps = None

    def __call__(self, phase: str, done: int, total: int, unit: str, /) -> None:
        """Show what a job reports; see `quantkit.base.progress.Progress`."""
        raise_if_interrupted()
        with self._writing():
            now = self._clock()
            current = self._phase
            continues = current is not None and (
                (current.name, current.total, current.unit) == (phase, total, unit)
            )
            # A phase that goes back begins again, with a rate of its own.
            if current is None or not continues or done < current.done:
                self._phase = _Phase(
                    name=phase, total=total, unit=unit, first=done, began=now, done=done, since=now
                )
            elif done > current.done:
                current.done = done
                current.since = now
            if self._steps is not None:
                if total:
                    share = done / total
                else:
                    share = 1.0
                self._steps.report(phase, share, now)
            self._show(now, begins=current is None or current.name != phase)

    def tick(self) -> None:
        """Show the progress again if it was not shown for long."""
        with self._writing():
            if self._phase is not None:
                self._show(self._clock(), begins=False)

    def _show(self, now: float, *, begins: bool) -> None:
        """Draw the bar or print a line, unless one was shown a short time ago. The beginning of a
        phase is always shown.
        """
        phase = self._phase
        if self._silent or phase is None:
            return
        terminal = self._stream.isatty()
        interval = _DRAW_SECONDS if terminal else _LINE_SECONDS
        if not begins and now - self._shown_at < interval:
            return
        self._shown_at = now
        if self._steps is None:
            name = phase.name
            share = phase.share
            remaining = phase.estimate_remaining_seconds(now)
        else:
            name = self._steps.label(phase.name)
            share = self._steps.share(now)
            remaining = self._steps.estimate_remaining_seconds(now)
        postfix_parts = []
        details = self._details()
        if details:
            postfix_parts.append(details)
        # At zero the estimate was too short, and says nothing about the end.
        if remaining:
            postfix_parts.append(f"{_clock_time(remaining)} left")
        if terminal:
            self._draw(phase, name, postfix_parts, share)
        else:
            line = ", ".join([f"quantkit: {name}: {phase.count()}", *postfix_parts])
            click.echo(line, file=self._stream)

    def _draw(self, phase: _Phase, name: str, postfix_parts: Sequence[str], share: float) -> None:
        """Draw the bar on the terminal, with its present width."""
        # In the last column, some terminals move the cursor to the next line.
        width = (terminal_columns(self._stream) or DEFAULT_COLUMNS) - 1
        if self._bar is None:
            # The import takes a tenth of a second, which a job without a bar does not spend.
            from tqdm import tqdm

            self._bar = tqdm(
                desc=name,
                initial=share,
                total=1.0,
                unit=phase.count(),
                bar_format=_FORMAT,
                file=self._stream,
                leave=False,
                ncols=width,
                nrows=2,
            )
        bar = self._bar
        bar.ncols = width
        bar.n = share
        bar.unit = phase.count()
        bar.set_description_str(name, refresh=False)
        bar.set_postfix_str(", ".join(postfix_parts), refresh=False)
        with bar.get_lock():  # type: ignore[no-untyped-call]  # other output takes it while the bar is hidden
            bar.refresh(nolock=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock out other threads; if stderr cannot be written, the job continues without
        progress.
        """
        with self._lock:
            try:
                yield
            except OSError:
                self._silent = True

    def _tick_on(self) -> None:
        """Call `tick` every second until the context ends."""
        while not self._ended.wait(_TICK_SECONDS):
            self.tick()


def _clock_time(seconds: float) -> str:
    """Format a duration as ``0:40``, ``12:05`` or ``1:02:03``."""
    minutes, remaining_seconds = divmod(max(math.ceil(seconds), 1), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{remaining_seconds:02}"
    return f"{minutes}:{remaining_seconds:02}"
