"""What `scripts/check_words.py` finds, and that it finds nothing in folders that are done."""

from __future__ import annotations

from pathlib import Path

import check_words
import pytest

DONE = ["evals", "kernels", "quantkit/doctor", "quantkit/formats", "scripts"]
"""Folders without findings.

Once all are clean: ``DONE: list[str] = []``, which stands for the whole repository.
"""


def test_the_words_are_those_of_the_field() -> None:
    assert [str(finding) for finding in check_words.find_words(DONE)] == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.py", "def told(asked_recipe): ...\n", ["asked_recipe", "told"]),
        ("a.py", "class AskedRecipe: ...\n", ["AskedRecipe"]),
        ("a.py", "_MOST_RUNS = 3\nself.least = 1\n", ["_MOST_RUNS", "least"]),
        ("a.py", '"""One that is held\nagainst another."""\n', ["held against"]),
        ("a.py", "x = 1  # of its own\n", ["of its own"]),
        ("a.py", 'raise ValueError("expected a whole number")\n', ["whole number"]),
        ("a.py", 'kind = "card"\nmodel_card = almost = 1\n', []),
        ("a.py", "def test_it_moves_at_most_a_quarter(): ...\n", []),
        ("a.py", "# a model card lists the most important figures\n", []),
        ("card_kernels.py", "", ["card_kernels"]),
        ("a.md", "It is for a card to say.\n", ["card"]),
        ("a.cpp", "// so many rows\nint told = 1;\n", ["so many"]),
        ("a.sh", "echo told  # memory is given back\n", ["given back"]),
        ("a.jinja", "Held against {{ reference }}\n", ["Held against"]),
    ],
)
def test_each_kind_of_place_is_read(
    name: str, content: str, words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(content)
    assert sorted({finding.word for finding in check_words.find_in_file(name, file)}) == sorted(
        words
    )


def test_an_exception_applies_in_its_place_alone(tmp_path: Path) -> None:
    file = tmp_path / "timing.py"
    file.write_text("least = 1\n")
    assert not list(check_words.find_in_file("evals/timing.py", file))
    assert [str(one) for one in check_words.find_in_file("evals/other.py", file)] == [
        "evals/other.py:1: 'least': use min"
    ]
