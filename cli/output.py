"""The standard streams: results on stdout, notes and progress bars on stderr."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click
from tqdm import tqdm

from quantkit.cli.spelling import as_options
from quantkit.progress import Progress

_MOST_COLUMNS = 100


def say(lines: Iterable[str], *, err: bool = False) -> None:
    """Print lines, with `err` to stderr; a reader that has closed its end misses them, and the command goes on to
    its exit code. So it does where stderr takes nothing: results are on stdout then."""
    try:
        click.echo("\n".join(map(as_options, lines)), err=err)
        (sys.stderr if err else sys.stdout).flush()
    except BrokenPipeError:
        drop_output(err=err)
    except OSError:
        if not err:
            raise
        drop_output(err=True)


def mention(line: str, *, err: bool = False) -> None:
    """Print a line that nothing depends on: what it tells of has been done, whether or not it can be printed."""
    try:
        click.echo(line, err=err)
        (sys.stderr if err else sys.stdout).flush()
    except OSError:
        drop_output(err=err)


def columns() -> int:
    """That a table may take up: those of the terminal, at most 100."""
    return min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns)


def note(line: str) -> None:
    """Tell the user something on stderr; of the processes of a group the first one does."""
    if os.environ.get("RANK", "0") == "0":
        mention(f"quantkit: note: {as_options(line)}", err=True)


@contextmanager
def bar(*, show: bool = True) -> Iterator[Progress]:
    """A bar on stderr that a job's progress calls move, silent where that is no terminal; it starts anew with each
    phase."""
    with tqdm(disable=None if show else True, leave=False) as line:
        begun: tuple[str, int] | None = None

        def report(phase: str, done: int, total: int, unit: str, /) -> None:
            nonlocal begun
            if begun != (phase, total):
                begun = phase, total
                line.set_description(phase, refresh=False)
                line.unit = f" {unit}"
                line.reset(total)
            line.update(done - line.n)

        yield report


def open_missing_streams() -> None:
    """Let standard streams that were closed when the process began lead nowhere: files opened later would get their
    numbers, and what is meant for the terminal."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def drop_output(*, err: bool = False) -> None:
    """Let standard output, or stderr, lead nowhere from now on, so that what is left of it does no harm."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())
