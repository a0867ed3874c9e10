"""The terminal: results on stdout, notes and progress on stderr; and how messages spell options."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Never, TextIO

import click

from quantkit.cli.entry import raise_if_interrupted
from quantkit.errors import DestinationError

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_SECONDS = 30.0
_TICK_SECONDS = 1.0
_DRAW_SECONDS = 0.1
_DEFAULT_COLUMNS = 80
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}{postfix}"
_MAX_COLUMNS = 100
_STDOUT = 1
_missing: set[int] = set()
_LABEL = re.compile(r"(?P<before>quantkit: | *)(?P<label>(internal )?error|Error|note|warning):")

_RENAMED = {"runtime": "for"}  # a keyword of Python
_POSITIONAL = ("path", "src", "dst")
_ARGUMENT = re.compile(r"`(?P<name>[a-z]\w*)(?:=(?P<value>[^`]*))?`")


def as_options(text: str) -> str:
    """A message of the library with the command line's options.

    In such messages an argument stands in backquotes: `` `resume=True` `` becomes ``--resume``,
    `` `source_check=False` `` becomes ``--no-source-check``, `` `to="meta"` `` becomes ``--to meta``, and a bare name
    becomes its option, or its argument, such as ``SRC``.
    """
    return _ARGUMENT.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if name in _POSITIONAL:
        return name.upper()
    name = _RENAMED.get(name, name).replace("_", "-")
    if value in (None, "True"):
        return f"--{name}"
    if value == "False":
        return f"--no-{name}"
    return f"--{name} {value.strip(chr(34))}"


def say(lines: Iterable[str], *, err: bool = False, wrap: bool = True) -> None:
    """Print lines, with `err` to stderr; `wrap` as for messages. If the reader has closed the pipe, or stderr cannot be
    written, the command continues to its exit code."""
    try:
        _print("\n".join(map(as_options, lines)), err=err, wrap=wrap)
    except BrokenPipeError:
        drop_output(err=err)
    except OSError:
        if not err:
            raise
        drop_output(err=True)


def mention(line: str, *, err: bool = False) -> None:
    """Print a line about work that is done; if it cannot be printed, the command continues."""
    try:
        _print(line, err=err, wrap=True)
    except OSError:
        drop_output(err=err)


def columns() -> int:
    """Width of a table: that of the terminal, at most 100."""
    return min(_MAX_COLUMNS, shutil.get_terminal_size((_MAX_COLUMNS, 24)).columns)


def is_rank0_process() -> bool:
    """Whether this is rank 0 of the processes that torchrun started; it alone prints."""
    return os.environ.get("RANK", "0") == "0"


def note(line: str) -> None:
    """Print a note on stderr, on rank 0."""
    if is_rank0_process():
        mention(f"quantkit: note: {as_options(line)}", err=True)


def warn(line: str) -> None:
    """Print a warning on stderr."""
    mention(f"quantkit: warning: {as_options(line)}", err=True)


def _print(text: str, *, err: bool, wrap: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    if wrap and stream.isatty():
        width = _columns(stream) or _DEFAULT_COLUMNS
        text = "\n".join(_colored(part) for line in text.split("\n") for part in _wrapped(line, width))
    with room_to_print():
        click.echo(text, err=err)
        stream.flush()


def _wrapped(line: str, width: int) -> list[str]:
    """A line for a terminal: a longer one is broken between words, its other lines indented."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _colored(line: str) -> str:
    """A message with its label, such as ``error:``, in color, unless the environment asks for none."""
    found = _LABEL.match(line)
    if found is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return line
    fault = found["label"].lower().endswith("error")
    label = click.style(f"{found['label']}:", fg="red" if fault else "yellow", bold=fault or None)
    return found["before"] + label + line[found.end() :]


def open_missing_streams() -> None:
    """Connect standard streams that were closed when the process began to /dev/null: files opened later would get their
    numbers, and the output meant for the terminal."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _missing.add(number)
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number that is free
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def require_stdout() -> None:
    """Raise a `DestinationError` if standard output was closed when the process began, before text is generated that
    only goes there."""
    if _STDOUT in _missing:
        raise DestinationError(
            "standard output is closed, and the generated text goes there",
            hint=f"add > {os.devnull} if you do not need it",
        )


def drop_output(*, err: bool = False) -> None:
    """Connect standard output, or stderr, to /dev/null, so that flushing the rest of it raises nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())


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

    def left(self, now: float) -> str | None:
        """The time left at the rate so far; None if the rate is not known yet."""
        made, taken = self.done - self.first, self.since - self.began
        if made <= 0 or taken <= 0 or self.done >= self.total:
            return None
        return f"{_clock_time((self.total - self.done) * taken / made - (now - self.since))} left"

    def line(self, now: float, details: str | None) -> str:
        state = f"quantkit: {self.name}: {self.done}/{self.total} {self.unit}"
        return ", ".join(part for part in (state, details, self.left(now)) if part)


class ProgressDisplay:
    """Shows the progress of jobs while the context lasts.

    On a terminal it is a bar with the name of the phase, how much of it is done and the time left; it disappears when
    the context ends. Elsewhere a line is printed when a phase begins, and then every 30 seconds.
    """

    def __init__(
        self, *, show: bool = True, clock: Callable[[], float] = time.monotonic, ticking: bool = True,
        details: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """
        Args:
            show: if unset, shows nothing; in a group of processes only rank 0 shows its progress.
            details: returns what else is shown, such as a speed.
            clock: the time in seconds.
            ticking: call `tick` every second, from a thread.
        """
        self._silent = not show
        self._clock, self._details = clock, details
        self._ticking = ticking and show
        self._phase: _Phase | None = None
        self._shown_at = 0.0
        self._stream = sys.stderr  # other code may redirect it for a while
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
        """Show what a job reports; see `quantkit.progress.Progress`."""
        raise_if_interrupted()
        with self._writing():
            now, before = self._clock(), self._phase
            continues = before is not None and (before.name, before.total, before.unit) == (phase, total, unit)
            if before is None or not continues or done < before.done:
                self._phase = _Phase(phase, total, unit, done, now, done, now)
            elif done > before.done:
                before.done, before.since = done, now
            self._show(now, begins=before is None or before.name != phase)

    def tick(self) -> None:
        """Show the progress again if it was not shown for long."""
        with self._writing():
            if self._phase is not None:
                self._show(self._clock(), begins=False)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Hide the bar, so that something else can be printed in its place."""
        with self._lock:
            if self._bar is not None:
                self._bar.clear(nolock=True)
            yield
            if self._bar is not None:
                self._bar.refresh(nolock=True)

    def _show(self, now: float, *, begins: bool) -> None:
        phase = self._phase
        if self._silent or phase is None:
            return
        terminal = self._stream.isatty()
        if not begins and now - self._shown_at < (_DRAW_SECONDS if terminal else _LINE_SECONDS):
            return
        self._shown_at = now
        if terminal:
            self._draw(phase, now)
        else:
            click.echo(phase.line(now, self._details()), file=self._stream)

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
        postfix = ", ".join(part for part in (self._details(), phase.left(now)) if part)
        bar.set_postfix_str(postfix, refresh=False)
        bar.refresh(nolock=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock out other threads; if stderr cannot be written, the job continues without progress."""
        with self._lock:
            try:
                yield
            except OSError:
                self._silent = True

    def _tick_on(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            self.tick()


def _columns(stream: TextIO) -> int:
    """The width of a terminal; 0 if it has none, as some without a window."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


_shown: set[ProgressDisplay] = set()
"""The displays that have a bar on the terminal."""


@contextmanager
def room_to_print() -> Iterator[None]:
    """Hide the bar, if there is one on the terminal, while something else is printed."""
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
