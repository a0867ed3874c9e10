"""Standard output, and what to do when nobody takes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import click


def say(lines: Iterable[str]) -> None:
    """Print lines; a reader that has closed its end misses them, and the command goes on to its exit code."""
    try:
        click.echo("\n".join(lines))
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Let standard output lead nowhere from now on, so that what is left of it does no harm."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
