"""Signals that interrupt a command."""

from __future__ import annotations

import signal
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


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt and SIGTERM `Terminated`, unless the parent process set
    them to ignored.
    """
    replaced_handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    for number in _RAISED:
        handler = signal.getsignal(number)
        # `main` of `quantkit.cli.entry` and that of `quantkit.cli.main` nest this context: the
        # inner one finds the handlers of the outer one and leaves them.
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
