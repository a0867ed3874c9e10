"""What the packaged calibration text holds, line by line."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
import unicodedata
from collections import Counter
from typing import Any

import pytest
from paths import ROOT

from quantkit.data.files import CALIBRATION, gate_texts

RUN = 12  # words


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in CALIBRATION.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    ]


def texts(document: dict[str, Any]) -> list[str]:
    return (
        [document["text"]]
        if "text" in document
        else [one["content"] for one in document["messages"]]
    )


def size(document: dict[str, Any]) -> int:
    return sum(len(text.encode()) for text in texts(document))


def runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}


def test_each_line_is_a_text_or_a_dialogue(documents: list[dict[str, Any]]) -> None:
    assert {frozenset(one) for one in documents} == {
        frozenset({"kind", "text"}),
        frozenset({"kind", "messages"}),
    }
    for one in documents:
        assert re.fullmatch("[a-z]+(-[a-z]+)?", one["kind"])
        assert 20 <= size(one) <= 12_500
        if "messages" in one:
            roles = [message["role"] for message in one["messages"]]
            turns = roles[1:] if roles[0] == "system" else roles
            assert turns
            assert turns == ["user", "assistant"] * (len(turns) // 2)


def test_clean(documents: list[dict[str, Any]]) -> None:
    for text in (text for one in documents for text in texts(one)):
        assert text
        assert text == text.strip()
        assert unicodedata.is_normalized("NFC", text)
        found = {char for char in text if unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs")}
        assert found <= {"\n", "\t"}
        assert "\ufffd" not in text
        assert "Gutenberg" not in text


def test_no_document_twice(documents: list[dict[str, Any]]) -> None:
    assert len({tuple(texts(one)) for one in documents}) == len(documents)


def test_no_document_is_another_respelled_or_in_it(documents: list[dict[str, Any]]) -> None:
    found: dict[tuple[str, ...], int] = {}
    shared: Counter[tuple[int, int]] = Counter()
    for number, one in enumerate(documents):
        own = set().union(*map(runs, texts(one)))
        shared.update((found[run], number) for run in own if run in found)
        found.update(dict.fromkeys(own, number))
    assert max(shared.values()) < 80


def test_shares_no_passage_with_what_the_gate_measures_on(documents: list[dict[str, Any]]) -> None:
    measured = set().union(*map(runs, gate_texts().values()))
    assert len(measured) > 2000
    assert not [one["kind"] for one in documents for text in texts(one) if runs(text) & measured]


def test_enough_of_each_sort(documents: list[dict[str, Any]]) -> None:
    sizes: Counter[str] = Counter()
    for one in documents:
        sizes[one["kind"].partition("-")[0]] += size(one)
    total = sizes.total()
    assert 1_200_000 <= total <= 1_500_000
    code = sum(sizes[kind] for kind in ("python", "cpp", "code"))
    assert 0.5 <= sizes["english"] / total <= 0.6
    assert code / total >= 0.09
    assert sizes["dialogue"] / total >= 0.09
    assert len({one["kind"] for one in documents}) >= 25


def test_composition_is_documented(documents: list[dict[str, Any]]) -> None:
    """The table of docs/calibration.md names each kind, how many documents it has, and their
    size.
    """
    rows = dict(
        re.findall(
            r"^\| `([a-z-]+)` \| (\d+ \| \d+) \|", (ROOT / "docs/calibration.md").read_text(), re.M
        )
    )
    number = Counter(one["kind"] for one in documents)
    sizes: Counter[str] = Counter()
    for one in documents:
        sizes[one["kind"]] += size(one)
    assert rows == {kind: f"{number[kind]} | {round(sizes[kind] / 1000)}" for kind in number}


def test_every_data_file_is_in_the_wheel() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tool["package-data"]["quantkit.data"]
    folder = ROOT / "quantkit/data"
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    data = [name for name in files if not name.endswith((".py", ".pyc"))]
    assert CALIBRATION.name in data
    assert not [
        name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]
