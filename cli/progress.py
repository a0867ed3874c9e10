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

from quantkit.cli.entry import raise_if_interrupted
from quantkit.cli.job_steps import JobSteps
from quantkit.cli.output import DEFAULT_COLUMNS, terminal_columns

if TYPE_CHECKING:
    from tqdm import tqdm

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
        """Return the seconds left at the rate so far; None if the rate is not known yet."""
        made = self.done - self.first
        taken = self.since - self.began
        if made <= 0 or taken <= 0 or self.done >= self.total:
            return None
        return (self.total - self.done) * taken / made - (now - self.since)

    @property
    def share(self) -> float:
        if self.total:
            return self.done / self.total
        return 1.0

    def count(self) -> str:
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
        self._steps: JobSteps | None = None
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
        with self._writing():
            if self._bar is not None:
                self._bar.close()
        self._silent = True

    def expect(self, steps: Mapping[str, float]) -> None:
        """Show the progress of a whole job from here, by the estimated seconds of its phases, in
        order.
        """
        if steps:
            self._steps = JobSteps(steps, self._clock())
        else:
            self._steps = None

    def __call__(self, phase: str, done: int, total: int, unit: str, /) -> None:
        """Show what a job reports; see `quantkit.base.progress.Progress`."""
        raise_if_interrupted()
        with self._writing():
            now = self._clock()
            before = self._phase
            continues = before is not None and (before.name, before.total, before.unit) == (
                phase,
                total,
                unit,
            )
            if before is None or not continues or done < before.done:
                self._phase = _Phase(phase, total, unit, done, now, done, now)
            elif done > before.done:
                before.done = done
                before.since = now
            if self._steps is not None:
                self._steps.report(phase, done / total if total else 1.0, now)
            self._show(now, begins=before is None or before.name != phase)

    def tick(self) -> None:
        """Show the progress again if it was not shown for long."""
        with self._writing():
            if self._phase is not None:
                self._show(self._clock(), begins=False)

    def _show(self, now: float, *, begins: bool) -> None:
        phase = self._phase
        if self._silent or phase is None:
            return
        terminal = self._stream.isatty()
        if not begins and now - self._shown_at < (_DRAW_SECONDS if terminal else _LINE_SECONDS):
            return
        self._shown_at = now
        name = phase.name
        left = phase.estimate_remaining_seconds(now)
        if self._steps is not None:
            name = self._steps.label(name)
            left = self._steps.estimate_remaining_seconds(now)
        rest = []
        for part in (self._details(), left and f"{_clock_time(left)} left"):
            if part:
                rest.append(part)
        if terminal:
            self._draw(
                phase, name, rest, phase.share if self._steps is None else self._steps.share(now)
            )
        else:
            click.echo(", ".join([f"quantkit: {name}: {phase.count()}", *rest]), file=self._stream)

    def _draw(self, phase: _Phase, name: str, postfix_parts: Sequence[str], share: float) -> None:
        width = (terminal_columns(self._stream) or DEFAULT_COLUMNS) - 1
        if self._bar is None:
            # Takes a tenth of a second.
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
        bar.ncols, bar.n, bar.unit = width, share, phase.count()
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
        while not self._ended.wait(_TICK_SECONDS):
            self.tick()


def _clock_time(seconds: float) -> str:
    """``0:40``, ``12:05``, ``1:02:03``."""
    minutes, rest = divmod(max(math.ceil(seconds), 1), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
