"""Draw what a command prints in a terminal, as SVG for the docs.

    python scripts/terminal_picture.py docs/bench-table.svg quantkit bench DIR...

The command runs in a terminal of 100 columns. Of lines that it draws over, as bars are, what stays
is drawn.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
from html import escape
from pathlib import Path

COLUMNS, LETTER, LINE, MARGIN = 100, 7.8, 18, 16  # the last three in pixels
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def printed(command: list[str]) -> list[str]:
    """Lines that a command leaves in a terminal."""
    out = bytearray()

    def read(terminal: int) -> bytes:
        out.extend(some := os.read(terminal, 1 << 16))
        return some

    code = os.waitstatus_to_exitcode(
        pty.spawn(["sh", "-c", f"stty cols {COLUMNS}; exec {shlex.join(command)}"], read)
    )
    if code:
        raise SystemExit(code)
    lines = CONTROL.sub("", out.decode()).replace("\r\n", "\n").rstrip().split("\n")
    return [line.rpartition("\r")[2].rstrip() for line in lines]


def wrapped(line: str) -> list[str]:
    """A line as a terminal breaks it."""
    return [line[start : start + COLUMNS] for start in range(0, max(1, len(line)), COLUMNS)]


def svg(lines: list[str]) -> str:
    """Light letters on a dark ground."""
    width, height = COLUMNS * LETTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * number - 5}" textLength="{len(line) * LETTER:g}"'
        f' xml:space="preserve" style="white-space: pre">{escape(line)}</text>'
        for number, line in enumerate(lines, 1)
        if line
    ]
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
                f' width="{width:g}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
                ' font-size="13" fill="#d8dee9">'
            ),
            '<rect width="100%" height="100%" rx="6" fill="#1f2430"/>',
            *rows,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    picture, *command = sys.argv[1:]
    lines = [f"$ {shlex.join(command)}", *printed(command)]
    Path(picture).write_text(svg([part for line in lines for part in wrapped(line)]))


if __name__ == "__main__":
    main()
