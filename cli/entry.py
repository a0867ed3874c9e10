"""Where the command begins: signals are told in one line from the first moment, before anything large is imported."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM came: all that Ctrl-C leaves sound is left sound."""


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        with terminable():
            from quantkit.cli.main import main as command

            command()
    except KeyboardInterrupt as error:
        tell_interrupted(error)
        sys.exit(interrupted_code(error))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to do that a traceback could tell of


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise `Terminated`, unless whoever started the process has it ignored; once, so that nothing
    disturbs what is done then."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ignore_signals() -> None:
    """Those of the terminal and of the launcher, of which the second comes too late."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def tell_interrupted(error: BaseException) -> None:
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


def _terminate(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
