"""The terminal: results on stdout, notes and progress on stderr."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

import click

from quantkit.base.json_values import printable
from quantkit.cli.entry import missing_streams
from quantkit.cli.hints import spell
from quantkit.errors import DestinationError

DEFAULT_COLUMNS = 80
"""Width of a terminal that has none."""
_MAX_COLUMNS = 100
_STDOUT = 1
_LABEL = re.compile(r"(?P<before>quantkit: | *)(?P<label>(internal )?error|Error|note|warning):")

# JSON escapes those below 0x20 itself.
_CONTROL_IN_JSON = re.compile("[\x7f-\x9f]")


def say(lines: Iterable[str], *, err: bool = False, wrap: bool = True) -> None:
    """Print lines, with `err` to stderr; `wrap` as for messages. If the reader has closed the pipe,
    or stderr cannot be written, the command continues to its exit code.
    """
    try:
        _print("\n".join(map(spell, lines)), err=err, wrap=wrap)
    except OSError as error:
        if not err and not isinstance(error, BrokenPipeError):
            raise
        drop_output(err=err)


def mention(line: str, *, err: bool = False) -> None:
    """Print a line about work that is done; if it cannot be printed, the command continues."""
    try:
        _print(line, err=err, wrap=True)
    except OSError:
        drop_output(err=err)


def print_generated(text: str, *, raw: bool = False) -> None:
    """Print text that a model wrote, without a line break after it.

    On a terminal, control characters are spelled, such as ``\\x1b``: whatever the model writes, it
    does not set the terminal's title, move its cursor or type on it. A pipe or a file gets the text
    as it is, since what reads it may need every byte, and no terminal interprets it.

    Args:
        text: the next piece of it.
        raw: print it as it is on a terminal too.
    """
    if not raw and sys.stdout.isatty():
        text = _spell_controls(text)
    # Otherwise click removes the codes of colors from what a pipe gets.
    click.echo(text, nl=False, color=True)


def print_generated_json(line: bytes, *, raw: bool = False) -> None:
    """Print a line of JSON with text that a model wrote, as `print_generated` does; it remains
    the same JSON.
    """
    if not raw and sys.stdout.isatty():
        line = _CONTROL_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line.decode()).encode()
    click.echo(line, nl=False)


def _spell_controls(text: str) -> str:
    return printable(text.replace("\r\n", "\n"), keep="\n\t")


def columns() -> int:
    """Width of a table: that of the terminal, at most 100."""
    return min(_MAX_COLUMNS, shutil.get_terminal_size((_MAX_COLUMNS, 24)).columns)


def is_rank0_process() -> bool:
    """Return whether this is rank 0 of the processes that torchrun started; it alone prints."""
    return os.environ.get("RANK", "0") == "0"


def note(line: str) -> None:
    """Print a note on stderr, on rank 0."""
    if is_rank0_process():
        mention(f"quantkit: note: {spell(line)}", err=True)


def warn(line: str) -> None:
    """Print a warning on stderr."""
    mention(f"quantkit: warning: {spell(line)}", err=True)


def _print(text: str, *, err: bool, wrap: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    if wrap and stream.isatty():
        width = terminal_columns(stream) or DEFAULT_COLUMNS
        text = "\n".join(
            _color_label(part) for line in text.split("\n") for part in _wrap_line(line, width)
        )
    with _room_to_print(stream):
        click.echo(text, err=err)
        stream.flush()


def _wrap_line(line: str, width: int) -> list[str]:
    """Return a line for a terminal: a longer one is broken between words, its other lines
    indented.
    """
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    if len(line) <= width:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _color_label(line: str) -> str:
    """Return a message with its label, such as ``error:``, in color, unless the environment asks
    for none.
    """
    match = _LABEL.match(line)
    if match is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return line
    fault = match["label"].lower().endswith("error")
    label = click.style(f"{match['label']}:", fg="red" if fault else "yellow", bold=fault or None)
    return match["before"] + label + line[match.end() :]


def require_stdout() -> None:
    """Raise a `DestinationError` if standard output was closed when the process began, before text
    is generated that only goes there.
    """
    if _STDOUT in missing_streams:
        raise DestinationError(
            "standard output is closed, and the generated text goes there",
            hint=f"add > {os.devnull} if you do not need it",
        )


def drop_output(*, err: bool = False) -> None:
    """Connect standard output, or stderr, to /dev/null, so that flushing the rest of it raises
    nothing.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())


def terminal_columns(stream: TextIO) -> int:
    """Return the width of a terminal; 0 if it has none, as some without a window."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _room_to_print(stream: TextIO) -> AbstractContextManager[None]:
    """Hides the bar, if there is one on the terminal, while something else is printed."""
    # Nothing has made a bar.
    if "tqdm" not in sys.modules:
        return nullcontext()
    from tqdm import tqdm

    return tqdm.external_write_mode(stream)
