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

from quantkit.base.json_values import spell_control_characters
from quantkit.cli.hints import spell
from quantkit.cli.streams import missing_streams
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
        text = _CONTROL_IN_JSON.sub(_escape_in_json, line.decode())
        line = text.encode()
    click.echo(line, nl=False)


def _escape_in_json(match: re.Match[str]) -> str:
    """Spell a character as JSON's escape."""
    return f"\\u{ord(match[0]):04x}"


def _spell_controls(text: str) -> str:
    """Spell control characters, except for line breaks and tabs."""
    return spell_control_characters(text.replace("\r\n", "\n"), keep="\n\t")


def table_width() -> int:
    """Choose the width of a table: that of the terminal, at most 100."""
    return min(_MAX_COLUMNS, shutil.get_terminal_size((_MAX_COLUMNS, 24)).columns)


def is_rank0_process() -> bool:
    """Return whether this is rank 0 of the processes that torchrun started; it alone prints."""
    return os.environ.get("RANK", "0") == "0"


def note(line: str) -> None:
    """Print a note on stderr, on rank 0."""
    if is_rank0_process():
        mention(f"quantkit: note: {spell(line)}", err=True)


def mention_memory(text: str, *, always: bool = False) -> None:
    """State on stderr what a model takes to run, see `RunMemory.text`: on a terminal, elsewhere
    only with `always`.
    """
    if always or sys.stderr.isatty():
        mention(f"memory to run: {text}", err=True)


def warn(line: str) -> None:
    """Print a warning on stderr."""
    mention(f"quantkit: warning: {spell(line)}", err=True)


def _print(text: str, *, err: bool, wrap: bool) -> None:
    """Print text, on a terminal wrapped and with labels in color. Raises `OSError` if it cannot be
    written.
    """
    stream = sys.stderr if err else sys.stdout
    if wrap and stream.isatty():
        width = terminal_columns(stream) or DEFAULT_COLUMNS
        terminal_lines = []
        for line in text.split("\n"):
            for part in _wrap_line(line, width):
                # After wrapping, which would count the codes of colors as text.
                terminal_lines.append(_color_label(part))
        text = "\n".join(terminal_lines)
    with _hide_bar(stream):
        click.echo(text, err=err)
        # An error of the stream is raised here, and not when Python exits.
        stream.flush()


def _wrap_line(line: str, width: int) -> list[str]:
    """Break a line that is longer than a terminal between words, and indent its other lines."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    if len(line) <= width:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _color_label(line: str) -> str:
    """Color the label of a message, such as ``error:``, unless the environment asks for none."""
    match = _LABEL.match(line)
    # https://no-color.org: any value of NO_COLOR but an empty one asks for no color.
    if match is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return line
    label = f"{match['label']}:"
    if match["label"].lower().endswith("error"):
        label = click.style(label, fg="red", bold=True)
    else:
        label = click.style(label, fg="yellow")
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
    stream = sys.stderr if err else sys.stdout
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def terminal_columns(stream: TextIO) -> int:
    """Return the width of a terminal; 0 if it has none, as some without a window."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def _hide_bar(stream: TextIO) -> AbstractContextManager[None]:
    """Hide the bar, if there is one on the terminal, while something else is printed."""
    # Without tqdm there is no bar, and its import would take a tenth of a second.
    if "tqdm" not in sys.modules:
        return nullcontext()
    from tqdm import tqdm

    return tqdm.external_write_mode(stream)


def report_interrupted(error: BaseException) -> None:
    """Report on stderr that the command was interrupted, and what is kept of its work."""
    # The terminal has echoed ^C in the line of the cursor.
    line_break = "\n" if sys.stderr.isatty() else ""
    mention(with_kept(f"{line_break}quantkit: interrupted", error), err=True)


def with_kept(message: str, error: BaseException) -> str:
    """Add to a message about an error what is kept of the job's work, if anything is."""
    from quantkit.formats.output.staging import find_kept_note

    work = find_kept_note(error)
    if work:
        return f"{message}; {spell(work)}"
    return message
