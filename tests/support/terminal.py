"""What a command shows on a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
from pathlib import Path

import forked

_COLUMNS = 100
READY = "\x1b[?2004h"
"""What a prompt tells the terminal when it takes keys."""


class Terminal:
    """One command, as a process of its own, and the terminal that it is on."""

    def __init__(
        self, *command: str | Path, cwd: Path, rows: int = 40, columns: int = _COLUMNS
    ) -> None:
        self._ours, its = os.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        # A session of its own, whose terminal this is: Ctrl-C on it is a signal.
        self._process = subprocess.Popen(
            list(map(str, command)),
            cwd=cwd,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(its)
        self._got, self._seen = b"", 0

    def type(self, keys: str) -> None:
        """Press keys; a return is ``\\r``, Ctrl-C ``\\x03``."""
        os.write(self._ours, keys.encode())

    def signal(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        self._process.send_signal(number)

    def wait_for(self, text: str) -> str:
        """What has come since the last time, up to a text that has to come."""
        while (place := self._text().find(text, self._seen)) < 0:
            assert self._read(), f"ended without {text!r}: {self._text()}"
        before, self._seen = self._seen, place + len(text)
        return self._text()[before : self._seen]

    def end(self) -> tuple[int, str]:
        """Wait for its end: its exit code, and all that the terminal got."""
        while self._read():
            pass
        os.close(self._ours)
        return self._process.wait(), self._got.decode()

    def _read(self) -> bool:
        try:
            piece = os.read(self._ours, 1 << 16)
        except TimeoutError:  # the test has waited for too long
            self._process.kill()
            self._process.wait()
            raise
        except OSError:  # the other end is closed
            return False
        self._got += piece
        return bool(piece)

    def _text(self) -> str:
        """Without what moves the cursor and chooses colours."""
        return re.sub(r"\x1b\[(?!\?2004h)[\d;?]*[A-Za-z]|\r", "", self._got.decode(errors="ignore"))


def on_terminal(
    *arguments: str | Path, cwd: Path, rows: int = 40, columns: int = _COLUMNS
) -> tuple[int, str]:
    """Exit code of one command, as a process of its own, and all that the terminal got."""
    return Terminal(*forked.quantkit(*arguments), cwd=cwd, rows=rows, columns=columns).end()


def screen(text: str) -> list[str]:
    """The lines that stand on a terminal in the end."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\r|\n|[^\r\n\x1b]+", text):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
        elif piece.endswith("m") and piece.startswith("\x1b"):
            continue  # a color
        elif piece.startswith("\x1b"):
            assert piece == "\x1b[A", f"unknown to this terminal: {piece!r}"
            row -= 1
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]
