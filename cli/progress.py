"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Never, TextIO

import click

from quantkit.cli.entry import raise_if_interrupted

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_SECONDS = 30.0
_TICK_SECONDS = 1.0
_DRAW_SECONDS = 0.1
_DEFAULT_COLUMNS = 80
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}{postfix}"


@dataclass
class _Phase:
    """How far a phase is.

    Attributes:
        first, begun: what was done when it began, and when that was.
        done, since: what is done, and since when.
    """

    name: str
    total: int
    unit: str
    first: int
    begun: float
    done: int
    since: float

    def left(self, now: float) -> str | None:
        """The time left at the pace so far; None as long as nothing tells the pace."""
        made, taken = self.done - self.first, self.since - self.begun
        if made <= 0 or taken <= 0 or self.done >= self.total:
            return None
        return f"{_clock_time((self.total - self.done) * taken / made - (now - self.since))} left"

    def line(self, now: float, beside: str | None) -> str:
        told = f"quantkit: {self.name}: {self.done}/{self.total} {self.unit}"
        return ", ".join(part for part in (told, beside, self.left(now)) if part)


class ProgressDisplay:
    """Shows people what jobs tell of their progress, while the context lasts.

    On a terminal that is a bar with the phase's name, how much of it is done and the time left; it is gone when the
    context ends. Elsewhere a line tells that a phase begins, and another every 30 seconds how far it is.
    """

    def __init__(
        self, *, show: bool = True, clock: Callable[[], float] = time.monotonic, ticking: bool = True,
        beside: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """
        Args:
            show: unset, it shows nothing: of the processes of a group the first one speaks.
            beside: gives what else is shown, such as a pace.
            clock: tells seconds.
            ticking: call `tick` every second, from a thread.
        """
        self._silent = not show
        self._clock, self._beside = clock, beside
        self._ticking = ticking and show
        self._phase: _Phase | None = None
        self._told = 0.0
        self._stream = sys.stderr  # others may lead theirs elsewhere for a while
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._writing():
            if self._bar is not None:
                self._bar.close()
        self._silent = True
        _shown.discard(self)

    def __call__(self, phase: str, done: int, total: int, unit: str, /) -> None:
        """Take what a job tells; see `quantkit.progress.Progress`."""
        raise_if_interrupted()
        with self._writing():
            now, before = self._clock(), self._phase
            goes_on = before is not None and (before.name, before.total, before.unit) == (phase, total, unit)
            if before is None or not goes_on or done < before.done:
                self._phase = _Phase(phase, total, unit, done, now, done, now)
            elif done > before.done:
                before.done, before.since = done, now
            self._tell(now, begins=before is None or before.name != phase)

    def tick(self) -> None:
        """Tell how things stand if that has not been told for long."""
        with self._writing():
            if self._phase is not None:
                self._tell(self._clock(), begins=False)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Without the bar, so that something else can be printed in its place."""
        with self._lock:
            if self._bar is not None:
                self._bar.clear(nolock=True)
            yield
            if self._bar is not None:
                self._bar.refresh(nolock=True)

    def _tell(self, now: float, *, begins: bool) -> None:
        phase = self._phase
        if self._silent or phase is None:
            return
        terminal = self._stream.isatty()
        if not begins and now - self._told < (_DRAW_SECONDS if terminal else _LINE_SECONDS):
            return
        self._told = now
        if terminal:
            self._draw(phase, now)
        else:
            click.echo(phase.line(now, self._beside()), file=self._stream)

    def _draw(self, phase: _Phase, now: float) -> None:
        width = (_columns(self._stream) or _DEFAULT_COLUMNS) - 1
        if self._bar is None:
            from tqdm import tqdm  # takes a tenth of a second

            self._bar = tqdm(
                desc=phase.name, initial=phase.done, total=max(phase.total, 1), unit=phase.unit, bar_format=_FORMAT,
                file=self._stream, leave=False, ncols=width, nrows=2,
            )  # fmt: skip
            _shown.add(self)
        bar = self._bar
        bar.ncols = width
        bar.n, bar.total, bar.unit = phase.done, max(phase.total, 1), phase.unit
        bar.set_description_str(phase.name, refresh=False)
        beside = ", ".join(part for part in (self._beside(), phase.left(now)) if part)
        bar.set_postfix_str(beside, refresh=False)
        bar.refresh(nolock=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One thread at a time; where stderr takes nothing, the job goes on all the same."""
        with self._lock:
            try:
                yield
            except OSError:
                self._silent = True

    def _tick_on(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self.tick()


def _columns(stream: TextIO) -> int:
    """Of a terminal; 0 where it does not know, as some that have no window do."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


_shown: set[ProgressDisplay] = set()
"""Those that have a bar on the terminal."""


@contextmanager
def room_to_print() -> Iterator[None]:
    """Where a bar is on the terminal, take it away while something else is printed."""
    for display in list(_shown):
        with display.cleared():
            yield
        return
    yield


def _clock_time(seconds: float) -> str:
    """``0:40``, ``12:05``, ``1:02:03``."""
    minutes, rest = divmod(max(math.ceil(seconds), 1), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
