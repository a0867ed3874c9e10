"""What the scripts share: `scripts/shared`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from paths import ROOT

from shared import processes
from shared.processes import Worker, WorkerEndedError, run_and_measure, run_peer
from shared.ratios import median_ratio
from shared.results import load_results, save_results
from shared.tables import Section, format_header, format_row, format_table

_REVERSE = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print(line[::-1].strip(), flush=True)
"""


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts").glob("*/*.py")), ids=lambda path: path.name
)
def test_a_script_finds_the_package_when_it_is_run(path: Path) -> None:
    """What imports the package appends the folder `scripts` before it does."""
    before, imports, _ = path.read_text().partition("from shared")
    if imports and path.parent.name != "shared":
        assert "sys.path.append(str(Path(__file__).resolve().parents[1]))" in before


def test_a_worker_answers_line_by_line() -> None:
    worker = Worker([sys.executable, "-c", _REVERSE], name="a worker")
    assert worker.read() == "ready"
    assert [worker.ask("abc"), worker.ask("de")] == ["cba", "ed"]
    worker.end()


def test_a_worker_that_ends_raises() -> None:
    worker = Worker([sys.executable, "-c", "import sys; sys.exit(3)"], name="a worker")
    with pytest.raises(WorkerEndedError, match="3"):
        worker.ask("abc")


def test_the_cost_of_a_command_is_its_own() -> None:
    code = "import sys; block = bytearray(100 << 20); sum(range(10 ** 6)); sys.exit(4)"
    cost = run_and_measure([sys.executable, "-c", code], code=4)
    assert 100 << 20 < cost.memory < 200 << 20
    assert cost.processor > 0
    assert cost.seconds > 0
    # This process has more memory than a small one that it starts.
    assert run_and_measure(["true"]).memory < 60 << 20


def test_a_command_gets_the_environment(tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(os.environ['SCRIPT_TOOLS'] != 'yes')"
    run_and_measure([sys.executable, "-c", code], {"SCRIPT_TOOLS": "yes"})
    with pytest.raises(SystemExit):
        run_and_measure([sys.executable, "-c", code], {"SCRIPT_TOOLS": "no"})


def test_a_peer_is_run_by_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PEERS", tmp_path)
    (tmp_path / "peer.py").write_text(
        "import sys; print(sys.argv[1:]); sys.exit(len(sys.argv) - 2)"
    )
    assert run_peer(sys.executable, "peer.py", 8) == "['8']\n"
    with pytest.raises(SystemExit):
        run_peer(sys.executable, "peer.py", 8, tmp_path)


def test_versions_of_packages_that_are_missing() -> None:
    versions = processes.find_versions(["pytest", "no-such-package"])
    assert versions == {"pytest": pytest.__version__, "no-such-package": "missing"}


def test_a_ratio_is_of_pairs() -> None:
    assert median_ratio([1, 8, 3], [1, 2, 6]) == 1
    with pytest.raises(ValueError, match="zip"):
        median_ratio([1, 2], [1])


def test_a_table_is_markdown() -> None:
    rows = [format_row("a", 1), format_row("b", 2.5)]
    assert format_table(("name", "n"), rows) == "| name | n |\n|---|---|\n| a | 1 |\n| b | 2.5 |\n"
    assert format_header("name") == "| name |\n|---|"


def test_a_section_of_a_page_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    mark = "<!-- made by scripts/{}.py -->\n{}\n<!-- end -->\n"
    page.write_text("a\n" + mark.format("x", "old") + "b\n" + mark.format("y", "kept"))
    section = Section("scripts/x.py")
    section.write(page, "new \\1\n")
    expected = "a\n" + mark.format("x", "new \\1") + "b\n" + mark.format("y", "kept")
    assert page.read_text() == expected
    assert section.find(expected) == "new \\1\n"
    assert Section("scripts/z.py").find(expected) is None


def test_results_are_continued(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert load_results(file) == load_results(None) == {}
    save_results(file, {"llama": 1})
    save_results(None, {"llama": 2})
    assert load_results(file) == {"llama": 1}
