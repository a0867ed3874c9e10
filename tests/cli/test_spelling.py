"""Options in messages, as Python and as the command line spell them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quantkit
from quantkit.base.messages import Message, Option
from quantkit.cli import hints
from quantkit.cli.quantize import quantize


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Message("add ", Option("resume", value=True), " to go on"), "add --resume to go on"),
        (Message(Option("source_check", value=False), " skips it"), "--no-source-check skips it"),
        (Message("pick ", Option("weights", value="meta")), "pick --weights meta"),
        (Message("more ", Option("activation_memory")), "more --activation-memory"),
        (Message(Option("calibration", metavar="FILE")), "--calibration FILE"),
        (Message(Option("lora", job="convert")), "--lora of quantkit convert"),
        (Message(Option("deep", value=True, job=""), " of doctor"), "--deep of doctor"),
        ("no such thing as `A B`", "no such thing as `A B`"),
    ],
)
def test_the_command_spells_its_options(
    message: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "_command", quantize)
    assert hints.spell(message) == expected


@pytest.mark.parametrize(
    "message", [Message("give ", Option("deep", value=True)), "give `resume=True`"]
)
def test_options_of_other_commands_and_of_python_are_found(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "_command", quantize)
    with pytest.raises(hints.UnknownOptionError):
        hints.spell(message)
    monkeypatch.setattr(hints, "strict", False)
    assert hints.spell(message).startswith("give ")


def test_the_library_speaks_no_command_line() -> None:
    root = Path(str(quantkit.__file__)).parent
    spelled_as_such = (
        "``|hf download|start the server with"  # clients of a server read its command's options
    )
    spelled = re.compile(r"""(?<![-\w|\\=_(])--[a-z][a-z-]+""")
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text().splitlines()
        if "cli" not in path.relative_to(root).parts
        and spelled.search(line)
        and not line.strip().startswith("#")
        and not re.search(spelled_as_such, line)
    ]
    assert found == []
