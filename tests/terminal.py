"""What a command shows on a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

_COLUMNS = 100


def on_terminal(*arguments: str | Path, cwd: Path, rows: int = 40, columns: int = _COLUMNS) -> tuple[int, str]:
    """Exit code of one command, as a process of its own, and all that the terminal got."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    command = [sys.executable, "-m", "quantkit.cli", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=cwd, stdin=its, stdout=its, stderr=its)
    os.close(its)
    got = b""
    try:
        while piece := os.read(ours, 1 << 16):
            got += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    return process.wait(), got.decode()


def screen(text: str) -> list[str]:
    """The lines that stand on a terminal in the end."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[\d*[A-Za-z]|\r|\n|[^\r\n\x1b]+", text):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
        elif piece.startswith("\x1b"):
            assert piece == "\x1b[A", f"unknown to this terminal: {piece!r}"
            row -= 1
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]
