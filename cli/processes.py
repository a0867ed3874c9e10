"""Commands that run as one of several processes, started by ``torchrun``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli.signals import get_interrupt_exit_code, ignore_signals
from quantkit.errors import QuantkitError
from quantkit.files.located import locate_existing_model
from quantkit.formats.output.destination import MANIFEST
from quantkit.formats.output.staging import require_finished, require_name

if TYPE_CHECKING:
    from quantkit.distributed.group import ProcessGroup

INTERNAL_ERROR = 1


@contextmanager
def join_group(
    options: Mapping[str, object] | None = None,
    device: str | None = None,
    *,
    check: Callable[[], None] | None = None,
) -> Iterator[ProcessGroup]:
    """Join the other processes for a while; `SINGLE` if there are none.

    One process reports an error, and the others only exit with its code. No process leaves before
    rank 0 has finished its own work, and all exit with the same code.

    Args:
        options: must be the same in all processes.
        device: see `join_processes`.
        check: validates the options; in a single process this is done before torch is imported.

    Raises:
        GroupError: if the options differ, or a process was lost.
    """
    if is_single_process() and check is not None:
        check()
    # This import loads torch, which takes long. Wrong options are reported before it.
    from quantkit.distributed.group import SINGLE, join_processes

    if is_single_process():
        yield SINGLE
        return
    # An error while this process joins the others is handled below, and has no group yet.
    group = SINGLE
    try:
        with join_processes(device) as group:
            common_options: dict[str, object] = {}
            for name, value in (options or {}).items():
                common_options[f"option {name}"] = value
            group.require_same(common_options)
            if check is not None:
                check()
            yield group
            if group.is_rank0:
                group.announce_exit(0)
            else:
                code = group.wait_for_end()
                if code:
                    raise click.exceptions.Exit(code)
    except BaseException as error:
        # A launcher that saw one process fail sends SIGTERM to the others, which would interrupt
        # the exchange of exit codes below.
        ignore_signals()
        # Ctrl-C goes to all processes. Only rank 0 reports it, with what is kept.
        if isinstance(error, KeyboardInterrupt) and not group.is_rank0:
            group.leave()
            raise click.exceptions.Exit(choose_exit_code(error)) from error
        # The error of the first process is the cause. The others fail because that one is lost.
        reports = group.is_first_to_fail()
        code = choose_exit_code(error)
        if group.is_rank0:
            group.announce_exit(code)
        elif not reports:
            # The wait is short, because rank 0 may be lost. Then the code is that of this error.
            code = group.wait_for_rank0() or code
        if reports:
            raise
        raise click.exceptions.Exit(code) from error


def require_models(*paths: Path | None, makes: Path | None = None) -> None:
    """Check that the models that a command reads exist, and the name of the folder that it makes,
    before torch is imported; not with several processes, whose disks may differ. Raises
    `RequestError` if a path does not exist or `makes` is not a valid name for a folder, and
    `CheckpointError` for the partial folder of an interrupted run.
    """
    if not is_single_process():
        return
    if makes is not None:
        require_name(makes)
    for path in paths:
        if path is not None:
            require_finished(locate_existing_model(path), MANIFEST)


def is_single_process() -> bool:
    """Return whether torchrun has started no other processes."""
    # Without `quantkit.distributed.group.count_processes`, whose module imports torch.
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def choose_exit_code(error: BaseException) -> int:
    """Choose the exit code for an error."""
    if isinstance(error, (QuantkitError, click.ClickException, click.exceptions.Exit)):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.exceptions.Abort)):
        return get_interrupt_exit_code(error)
    return INTERNAL_ERROR
