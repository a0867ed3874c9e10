"""Options in messages, as Python and as the command line spell them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quantkit
from quantkit.cli.hints import spell


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add `resume=True` to go on", "add --resume to go on"),
        ("`source_check=False` skips it", "--no-source-check skips it"),
        ('pick one with `weights="meta"`', "pick one with --weights meta"),
        ("more `activation_memory`", "more --activation-memory"),
        ("`calibration=FILE`", "--calibration FILE"),
        ("`text_column` goes with `texts`", "--text-column goes with --text"),
        ("no such thing as `A B`", "no such thing as `A B`"),
    ],
)
def test_arguments_become_options(text: str, expected: str) -> None:
    assert spell(text) == expected


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
