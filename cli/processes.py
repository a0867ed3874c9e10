"""Being one of several processes that ``torchrun`` started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.distributed.group import Group

INTERNAL_ERROR = 1
INTERRUPTED = 130


@contextmanager
def together(options: Mapping[str, object] | None = None, device: str | None = None) -> Iterator[Group | None]:
    """Join the other processes for a while; None if there are none.

    An error is told by one process; the others only exit with its code. None leaves before the first has
    done what it does alone, and they exit as it does.

    Args:
        options: which all processes must have been given alike.
        device: see `joined`.

    Raises:
        GroupError: if they have not, or one was lost.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    from quantkit.distributed.group import joined

    group = None
    try:
        with joined(device) as group:
            if group is not None:
                group.require_same({f"option {name}": value for name, value in (options or {}).items()})
            yield group
            if group is not None:
                _leave(group)
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's and the launcher's: the second comes too late
        told_here = group is None or group.is_first_to_fail()
        if group is not None and group.first:
            group.tell_end(exit_code(error))
        elif group is not None and not told_here:
            group.let_the_first_speak()
        if told_here:
            raise
        raise click.exceptions.Exit(exit_code(error)) from error


def _leave(group: Group) -> None:
    if group.first:
        group.tell_end(0)
    elif code := group.wait_for_end():
        raise click.exceptions.Exit(code)


def is_first(group: Group | None) -> bool:
    """Whether this process speaks and writes for all."""
    return group is None or group.first


def exit_code(error: BaseException) -> int:
    """What a process exits with for an error."""
    if isinstance(error, (QuantkitError, click.ClickException, click.exceptions.Exit)):
        return error.exit_code
    return INTERRUPTED if isinstance(error, (KeyboardInterrupt, click.exceptions.Abort)) else INTERNAL_ERROR
