"""The decision records have one form, an index, and links that work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

DECISIONS = ROOT / "docs" / "decisions"
RECORDS = sorted(DECISIONS.glob("[0-9]*.md"))
HEADINGS = ["Context", "Decision", "Alternatives", "Consequences"]


def test_the_index_lists_every_decision_record_with_its_title() -> None:
    index = (DECISIONS / "README.md").read_text()
    rows = re.findall(r"^\| \[(\d{4})\]\((.+\.md)\) \| (.+) \|$", index, re.MULTILINE)
    records = []
    for record in RECORDS:
        title = record.read_text().splitlines()[0]
        number, _, decision = title.removeprefix("# ").partition(": ")
        records.append((number, record.name, decision))
    assert sorted(rows) == records
    assert [number for number, _, _ in records] == [f"{n:04d}" for n in range(1, len(RECORDS) + 1)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_decision_record_has_its_headings_and_working_links(record: Path) -> None:
    text = record.read_text()
    assert record.name.startswith(text.removeprefix("# ")[:4])
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text):
        page = record.parent / target
        assert page.is_file(), target
        assert not anchor or anchor in _anchors(page), f"{target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings, and those that it states."""
    text = page.read_text()
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        anchors.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return anchors
