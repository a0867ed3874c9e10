"""What messages and help look like on a terminal: lines break between words, and labels have
colors.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click
import pytest
from command import Capture, run
from terminal import on_terminal, screen

from quantkit.base.messages import Message, Option, join_messages
from quantkit.cli.main import quantkit
from quantkit.cli.output import note, say, warn
from quantkit.evals.table import Table, render

LONG = join_messages(
    "",
    [Message("a note on ", Option("tensors_only", value=True), " and some-hyphenated-words, ")] * 4,
)
RED, YELLOW, RESET = "\x1b[31m\x1b[1m", "\x1b[33m", "\x1b[0m"


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def _on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of the standard streams, which pytest replaces between a fixture and
    its test.
    """
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


def test_messages_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _on_terminal(monkeypatch)
    note(LONG)
    lines = click.unstyle(terminal.getvalue()).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80
    whole = f"quantkit: note: {LONG}".replace("`tensors_only=True`", "--tensors-only")
    assert " ".join(lines).split() == whole.split()
    assert all(line.startswith("  ") for line in lines[1:])


def test_json_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _on_terminal(monkeypatch)
    say([LONG], wrap=False)
    assert len(terminal.getvalue().splitlines()) == 1


def test_labels_have_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _on_terminal(monkeypatch)
    note("one")
    warn("two")
    say(["  note: three", "another note: four"])
    assert terminal.getvalue().splitlines() == [
        f"quantkit: {YELLOW}note:{RESET} one",
        f"quantkit: {YELLOW}warning:{RESET} two",
        f"  {YELLOW}note:{RESET} three",
        "another note: four",
    ]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_the_environment_turns_colors_off(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _on_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    note("one")
    assert terminal.getvalue() == "quantkit: note: one\n"


def test_errors_are_red_and_broken_between_words_and_plain_in_a_pipe(
    tmp_path: Path, capfd: Capture
) -> None:
    folder = tmp_path / "-".join(["absent"] * 8)
    code, out, err = run(capfd, "inspect", folder)
    assert (out, err.count("\n")) == ("", 1)
    shown = on_terminal("inspect", folder, cwd=tmp_path, columns=80)
    assert shown[0] == code
    assert shown[1].startswith(f"quantkit: {RED}error:{RESET}")
    lines = screen(shown[1])
    assert " ".join(lines).split() == err.split()
    assert len(lines) > 2
    _, usage = on_terminal("inspect", "--absent", cwd=tmp_path, columns=80)
    assert f"{RED}Error:{RESET} No such option" in usage


def test_help_is_broken_between_words() -> None:
    for name in ("", *quantkit.commands):
        command = quantkit.commands[name] if name else quantkit
        narrow = click.Context(command, info_name=name, terminal_width=80)
        wide = click.Context(command, info_name=name, terminal_width=1000)
        assert command.get_help(narrow).split() == command.get_help(wide).split(), name


def test_cells_and_titles_are_broken_between_words() -> None:
    table = Table(
        "a-title-of-words " * 9,
        ("model", "why"),
        [("some-hyphenated-name-of-a-model", "not-broken " * 9)],
    )
    lines = render([table], "terminal", width=80)
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert (words.count("a-title-of-words"), words.count("not-broken")) == (9, 9)
    assert "some-hyphenated-name-of-a-model" in words
