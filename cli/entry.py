"""Where the command begins: signals are told in one line from the first moment, before anything large is imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM came: all that Ctrl-C leaves sound is left sound."""


_RAISED: dict[int, type[KeyboardInterrupt]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
_USUAL = (signal.SIG_DFL, signal.default_int_handler)
_came: list[int] = []


def main() -> None:
    """Run the command line and exit with its code."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch, loaded later, asks for huge pages: fewer faults
    try:
        with interruptible():
            from quantkit.cli.main import main as command

            command()
    except KeyboardInterrupt as error:
        report_interrupted(error)
        sys.exit(interrupted_code(error))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to do that a traceback could tell of


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt and SIGTERM `Terminated`; not what whoever started the process has ignored."""
    before = {number: signal.getsignal(number) for number in _RAISED}
    ours = [number for number, handler in before.items() if handler in _USUAL]
    try:
        for number in ours:
            signal.signal(number, _interrupt)
    except ValueError:  # signals are for the main thread
        ours = []
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
        if ours:
            _came.clear()


def raise_if_interrupted() -> None:
    """Interrupt again what was interrupted where others have swallowed the exception, as imports do.

    Raises:
        KeyboardInterrupt: if a signal came.
    """
    if _came:
        raise _RAISED[_came[0]]


def ignore_signals() -> None:
    """Those of the terminal and of the launcher, of which the second comes too late."""
    for number in _RAISED:
        signal.signal(number, signal.SIG_IGN)


def report_interrupted(error: BaseException) -> None:
    """Say on stderr that the command was interrupted, and what it has left."""
    import click

    from quantkit.cli.spelling import as_options
    from quantkit.formats.output.staging import kept

    after_echo = "\n" if sys.stderr.isatty() else ""  # of ^C
    left = kept(error)
    click.echo(f"{after_echo}quantkit: interrupted" + (f"; {as_options(left)}" if left else ""), err=True)


def interrupted_code(error: BaseException) -> int:
    """What a process that was interrupted exits with."""
    return TERMINATED if isinstance(error, Terminated) else INTERRUPTED


def _interrupt(number: int, _frame: FrameType | None) -> None:
    again = signal.SIGTERM in _came
    _came.append(number)
    if number == signal.SIGTERM and again:
        return  # what the first has set off is under way
    raise _RAISED[number]
