"""What the README shows is true: its examples run, its links and commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from paths import ROOT

import quantkit

pytestmark = pytest.mark.processes

README = (ROOT / "README.md").read_text()


HUB_MODEL = "Qwen/Qwen2.5-0.5B"


def _blocks(mark: str = "run") -> list[tuple[str, str]]:
    """The code blocks with a mark: language and text."""
    return re.findall(rf"<!-- {mark} -->\n```(\w*)\n(.*?)```", README, re.DOTALL)


def _run(line: str, folder: Path) -> str:
    """What a command line prints; one that is a command alone runs in a process that has torch
    imported.
    """
    words = shlex.split(line)
    if words[0] == "quantkit" and not {"|", ">"} & set(words):
        command = forked.quantkit(*words[1:])
    else:
        command = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.slow
def test_the_examples_run_in_order(tmp_path: Path) -> None:
    (_, jobs), (_, stream), (_, prompts), (_, batch) = blocks = _blocks()
    assert [language for language, _ in blocks] == ["", "python", "", "python"]
    for line in jobs.splitlines():
        assert _run(line, tmp_path).strip(), line
    streamed = _script(stream, tmp_path)
    assert len(streamed.split()) > 5
    whole = _run('quantkit generate int4 "My fellow citizens" --max-new-tokens 50', tmp_path)
    assert whole == f"{streamed}\n"  # in whole words, as the command prints them
    for line in prompts.splitlines():
        assert _run(line, tmp_path).strip() or ">" in line, line
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert re.findall(r"^\d ", _script(batch, tmp_path), re.MULTILINE) == ["0 ", "0 ", "1 ", "1 "]


def _script(text: str, folder: Path) -> str:
    """What a script prints."""
    command = forked.command("-c", text)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_way_from_download_to_generation_runs_with_a_small_model(
    demo_model: Path, tmp_path: Path
) -> None:
    """The hub's model and text stand for small ones that are here."""
    ((_, text),) = _blocks("run: hub")
    lines = text.splitlines()
    quantkit.convert(demo_model, tmp_path / "model")
    assert f"inspect hf:{HUB_MODEL}" in lines[0]
    for line in lines:
        small = line.replace(f"hf:{HUB_MODEL}", "model")
        small = small.replace("--scheme int4-g128", "--scheme int4-g128 --samples 16 --length 128")
        assert _run(small, tmp_path).strip(), line


def test_every_command_is_shown() -> None:
    from quantkit.cli.main import quantkit

    for name in quantkit.commands:
        assert f"quantkit {name}" in README


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_exit_codes_in_the_docs_are_those_of_the_errors() -> None:
    from quantkit import errors

    listed = dict(
        re.findall(
            r"^\| (\d+) \|.*\| `(\w+Error)` \|$",
            (ROOT / "docs/errors.md").read_text(),
            re.MULTILINE,
        )
    )
    kinds = [
        k
        for k in vars(errors).values()
        if isinstance(k, type) and k.__base__ is errors.QuantkitError
    ]
    assert {str(k.exit_code): k.__name__ for k in kinds} == listed


def test_the_bounds_in_the_docs_are_those_in_force() -> None:
    from quantkit.quality.bounds import BOUNDS, TIMES_ROUNDING, Bound
    from quantkit.quality.source_check import NOTED_BITS_PER_BYTE

    page = (ROOT / "docs/errors.md").read_text()
    rows = re.findall(
        r"^\| ((?:float16|bfloat16|fp8|int[2-8])[^|]*) \| (\S+) \| (\S+) \|$", page, re.M
    )
    assert {
        names.split(",")[0]: Bound(float(kl), float(ratio)) for names, kl, ratio in rows
    } == BOUNDS
    assert f"{TIMES_ROUNDING:g} times the error of rounding" in " ".join(page.split())
    assert f"more than {NOTED_BITS_PER_BYTE:g} bits a byte" in " ".join(page.split())
