"""The mutations of `scripts/release/mutation_check.py`, and what tests say about them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import mutation_check
import pytest
from mutation_check import Place

_CODE = """
LIMIT = 3


def clip(value: int) -> int:
    if value > LIMIT:
        return LIMIT
    match value:
        case 0:
            return 1
    return value
"""
_TESTS = """
import pytest
from quantkit.clip import clip


def test_small_values():
    assert clip(2) == 2


@pytest.mark.slow
def test_large_values():
    assert clip(5) == 3
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository of one function with a fast and a slow test."""
    root = tmp_path / "repository"
    files = {
        "quantkit/__init__.py": "",
        "quantkit/clip.py": _CODE,
        "tests/test_clip.py": _TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "add", "quantkit", "tests", "pyproject.toml"], cwd=root, check=True)
    return root


def test_every_statement_of_a_function_has_places(repository: Path) -> None:
    places = mutation_check.find_places(repository, ["quantkit"])
    assert sorted((place.line, place.mutation) for place in places) == [
        (6, "comparison flipped"),
        (7, "returned value replaced"),
        (10, "constant changed"),
        (10, "returned value replaced"),
        (11, "returned value replaced"),
    ]


@pytest.mark.parametrize(
    ("statement", "mutant"),
    [
        ("a < b", "a >= b"),
        ("a + 2", "a - 2"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("3", "4"),
        ("True", "False"),
    ],
)
def test_an_expression_is_mutated(statement: str, mutant: str) -> None:
    node = ast.parse(statement, mode="eval").body
    assert list(mutation_check.list_mutations(node))
    assert ast.unparse(mutation_check.mutate(node)) == mutant
    assert ast.unparse(node) == statement


@pytest.mark.slow
def test_verdicts_are_kept_by_marker_and_the_suite_is_recorded_once(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the environment has installed takes seconds to load in each run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    file = tmp_path / "state.json"
    arguments = ["--repository", str(repository), "--state", str(file), "--workers", "1"]
    arguments += ["--folders", "quantkit", "--count", "5", "--seconds", "60"]
    mutation_check.main(arguments)
    kept = json.loads(file.read_text())
    places = [Place(*place) for place in kept["places"]]
    flipped = [place.mutation for place in places].index("comparison flipped")
    clipped = [place.line for place in places].index(7)
    unreached = [place.line for place in places].index(10)
    assert [len(kept["tests"][index]) for index in (flipped, clipped, unreached)] == [2, 1, 0]
    verdicts = kept["verdicts"][""]
    assert verdicts[str(flipped)][0] == "caught"
    assert verdicts[str(clipped)][0] == "caught"
    assert verdicts[str(unreached)][0] == "not reached"

    # The tests of a place are taken from the file: with none recorded for it, none runs.
    kept["tests"][flipped] = []
    file.write_text(json.dumps(kept))
    mutation_check.main([*arguments, "--marker", "not slow"])
    both = json.loads(file.read_text())
    assert both["verdicts"][""] == verdicts
    fast = both["verdicts"]["not slow"]
    assert fast[str(flipped)][0] == "not reached"
    assert fast[str(clipped)][0] == "not reached"
    assert fast[str(places.index(max(places)))][0] == "caught"


def test_tests_that_take_too_long_reach_the_time_limit(repository: Path, tmp_path: Path) -> None:
    place = Place("quantkit/clip.py", 11, 0, "statement dropped")
    tests = ["tests/test_clip.py"]
    verdict = mutation_check.judge_mutation(repository, place, tests, tmp_path, seconds=0.01)
    assert verdict == "time limit"
