"""Where the command begins: signals are reported in one line from the start, before anything
large is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; handled like Ctrl-C."""


_RAISED: dict[int, type[KeyboardInterrupt]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: Terminated,
}
_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
_received: list[int] = []
missing_streams: set[int] = set()
"""Numbers of the standard streams that were closed when the process began."""


def main() -> None:
    """Run the command line and exit with its code."""
    open_missing_streams()
    # torch, which is imported later, then allocates in huge pages: fewer page faults.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Threads that wait for long take the processor from other programs.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        with interruptible():
            from quantkit.cli.main import main as command

            command()
    except KeyboardInterrupt as error:
        report_interrupted(error)
        sys.exit(get_interrupt_exit_code(error))
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # Nothing is left that needs a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def open_missing_streams() -> None:
    """Connect standard streams that were closed when the process began to /dev/null: files opened
    later, by imports too, would get their numbers, and the output meant for the terminal.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            missing_streams.add(number)
            # POSIX returns the lowest number that is free, which is the closed stream's.
            os.open(os.devnull, os.O_RDWR)
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for number, (name, mode) in enumerate(modes.items()):
        # Python sets a stream to None if its number was closed.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt and SIGTERM `Terminated`, unless the parent process set
    them to ignored.
    """
    replaced_handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    for number in _RAISED:
        handler = signal.getsignal(number)
        # `main` of this module and of `quantkit.cli.main` nest this context: the inner one finds
        # the handlers of the outer one and leaves them.
        if handler in _DEFAULT_HANDLERS:
            replaced_handlers[number] = handler
    try:
        for number in replaced_handlers:
            signal.signal(number, _interrupt)
    except ValueError:
        # Python sets handlers only in the main thread.
        replaced_handlers = {}
    try:
        yield
    finally:
        for number, handler in replaced_handlers.items():
            signal.signal(number, handler)
        if replaced_handlers:
            _received.clear()


def raise_if_interrupted() -> None:
    """Raise the KeyboardInterrupt of a received signal again, as other code may have swallowed
    it: imports do.
    """
    if _received:
        raise _RAISED[_received[0]]


def ignore_signals() -> None:
    """Ignore the signals of the terminal and of the launcher, whose second one comes too late."""
    for number in _RAISED:
        signal.signal(number, signal.SIG_IGN)


def report_interrupted(error: BaseException) -> None:
    """Report on stderr that the command was interrupted, and what is kept of its work."""
    from quantkit.cli.output import mention

    # The terminal has echoed ^C in the line of the cursor.
    line_break = "\n" if sys.stderr.isatty() else ""
    mention(with_kept(f"{line_break}quantkit: interrupted", error), err=True)


def with_kept(message: str, error: BaseException) -> str:
    """Add to a message about an error what is kept of the job's work, if anything is."""
    from quantkit.cli.hints import spell
    from quantkit.formats.output.staging import kept

    work = kept(error)
    if work:
        return f"{message}; {spell(work)}"
    return message


def get_interrupt_exit_code(error: BaseException) -> int:
    """Return the exit code of an interrupted process."""
    if isinstance(error, Terminated):
        return TERMINATED
    return INTERRUPTED


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """Raise the exception of a signal, but only once for SIGTERM."""
    has_sigterm = signal.SIGTERM in _received
    _received.append(number)
    # The exception of the first SIGTERM is still being handled, and another would interrupt that.
    if number == signal.SIGTERM and has_sigterm:
        return
    raise _RAISED[number]
