"""Files that people and services around the code read: decision records, workflows and hooks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from paths import ROOT

DECISIONS = ROOT / "docs" / "decisions"
RECORDS = sorted(DECISIONS.glob("[0-9]*.md"))
HEADINGS = ["Context", "Decision", "Alternatives", "Consequences"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"


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


def test_yaml_files_parse() -> None:
    files = [HOOKS, *(ROOT / ".github").rglob("*.yml")]
    assert len(files) > len(WORKFLOWS) > 0
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text()), dict), file


def test_workflows_use_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^([\w./ -]+):(?!=)", makefile, re.MULTILINE)).split())
    for workflow in WORKFLOWS:
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            for step in job["steps"]:
                for arguments in re.findall(r"^make (.*)$", step.get("run", ""), re.MULTILINE):
                    named = re.sub(r'\w+=("[^"]*"|\S*)', "", arguments).split()
                    assert targets.issuperset(named), (workflow.name, arguments)


def test_hooks_run_the_ruff_of_make_lint() -> None:
    locked = re.findall(r"^ruff==.+$", (ROOT / "requirements-test.lock").read_text(), re.MULTILINE)
    repositories = yaml.safe_load(HOOKS.read_text())["repos"]
    hooks = {hook["id"]: hook for repository in repositories for hook in repository["hooks"]}
    for name in ("ruff-check", "ruff-format"):
        assert hooks[name]["additional_dependencies"] == locked
