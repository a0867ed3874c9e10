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
    from quantkit.parallel.group import Group

INTERNAL_ERROR = 1
INTERRUPTED = 130


@contextmanager
def together(options: Mapping[str, object] | None = None, device: str | None = None) -> Iterator[Group | None]:
    """Join the other processes for a while; None if there are none.

    An error is told by one process; the others only exit with its code.

    Args:
        options: which all processes must have been given alike.
        device: see `joined`.

    Raises:
        GroupError: if they have not, or one was lost.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    from quantkit.parallel.group import joined

    group = None
    try:
        with joined(device) as group:
            if group is not None:
                group.require_same({f"option {name}": value for name, value in (options or {}).items()})
            yield group
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's and the launcher's: the second comes too late
        if group is None or group.is_first_to_fail():
            raise
        raise click.exceptions.Exit(exit_code(error)) from error


def is_first(group: Group | None) -> bool:
    """Whether this process speaks and writes for all."""
    return group is None or group.first


def exit_code(error: BaseException) -> int:
    """What a process exits with for an error."""
    if isinstance(error, (QuantkitError, click.ClickException, click.exceptions.Exit)):
        return error.exit_code
    return INTERRUPTED if isinstance(error, (KeyboardInterrupt, click.exceptions.Abort)) else INTERNAL_ERROR
