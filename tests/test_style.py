"""The measures of `scripts/release/check_style.py`, and that it fails when one gets worse."""

from __future__ import annotations

from pathlib import Path

import check_style
import pytest

_CODE = '''
"""A module."""

# Why the next line is there.
LIMIT = 3  # not on a line of its own


def settled(given):
    """The schemes of an output."""
    a, b = given
    return [one for one in a] if b else None


def choose_schemes(layers):
    """Choose a scheme for each layer."""
    return layers  # fmt: skip


class Plan:
    def open(self): ...
'''


@pytest.fixture
def counts(tmp_path: Path) -> check_style.Counts:
    file = tmp_path / "code.py"
    file.write_text(_CODE)
    return check_style.count_folders([tmp_path])


def test_what_is_counted(counts: check_style.Counts) -> None:
    assert (counts.names, counts.vague) == (7, 2)  # `given` and `one` say nothing
    assert (counts.functions, counts.participles) == (3, 1)
    assert (counts.ternaries, counts.comprehensions, counts.tuples) == (1, 1, 1)
    assert (counts.comments, counts.skips) == (1, 1)
    assert (counts.definitions, counts.documented) == (4, 2)
    assert (counts.function_docs, counts.verb_docs) == (2, 1)
    assert [place.split(":")[1] for place in counts.places] == ["8", "8", "11"]


@pytest.mark.parametrize(("name", "change"), [("ternaries", -1.0), ("comments", 1.0)])
def test_a_measure_may_get_better_but_not_worse(name: str, change: float) -> None:
    assert not check_style.is_worse(name, 20.0, 20.0)
    assert not check_style.is_worse(name, 20.0 + change, 20.0)
    assert check_style.is_worse(name, 20.0 - change, 20.0)


def test_it_fails_when_a_limit_is_passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(_CODE)
    limits = tmp_path / "style.toml"
    monkeypatch.setattr(check_style, "ROOT", tmp_path)
    monkeypatch.setattr(check_style, "PACKAGE", (".",))
    monkeypatch.setattr(check_style, "LIMITS", limits)
    assert check_style.main(["--update"]) == 0
    assert check_style.main([]) == 0
    (tmp_path / "code.py").write_text(_CODE + "\nfound = 1\n")
    assert check_style.main([]) == 1
