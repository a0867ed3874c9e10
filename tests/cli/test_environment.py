"""``quantkit --version --verbose``, the report for a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import Capture, run

from quantkit.base import memory
from quantkit.base.cgroups import MemoryLimit
from quantkit.cli import environment
from quantkit.version import __version__

NAMES = [
    "quantkit",
    "Python",
    "torch",
    "libraries",
    "system",
    "processor",
    "processors",
    "memory",
    "kernels",
    "threads",
    "GPUs",
    "caches",
    "settings",
]


def _rows(out: str) -> dict[str, str]:
    """The values by their names; a value may have several lines."""
    column = max(map(len, NAMES)) + 2
    name, rows = "", dict[str, str]()
    for line in out.splitlines():
        assert len(line) <= 100
        assert line[column - 1] == " " != line[column], "values begin in one column"
        name = line[:column].strip() or name
        rows[name] = f"{rows.get(name, '')} {line[column:]}".strip()
    return rows


def test_it_has_one_row_for_each_topic_in_both_orders(capfd: Capture) -> None:
    code, out, err = run(capfd, "--version", "--verbose")
    assert (code, err) == (0, "")
    rows = _rows(out)
    assert list(rows) == NAMES
    assert (rows["quantkit"], rows["torch"]) == (__version__, torch.__version__)
    assert rows["threads"] == "1, from the environment"
    assert "OMP_NUM_THREADS=1" in rows["settings"]
    assert "safetensors " in rows["libraries"]
    assert list(_rows(run(capfd, "--verbose", "--version")[1])) == NAMES


def test_the_version_alone_is_one_line_and_verbose_alone_an_error(capfd: Capture) -> None:
    assert run(capfd, "--version") == (0, f"quantkit, version {__version__}\n", "")
    for arguments in (["--verbose"], ["--verbose", "demo"]):
        code, out, err = run(capfd, *arguments)
        assert (code, out) == (2, "")
        assert "--verbose" in err
        assert "--version" in err


@pytest.mark.slow
def test_it_names_no_user_and_compiles_nothing(tmp_path: Path) -> None:
    home, cache = tmp_path / "alice", tmp_path / "alice" / "my" / "cache"
    cache.mkdir(parents=True)
    settings = {
        "HOME": str(home),
        "QUANTKIT_CACHE": str(cache),
        "CXX": "/data/alice/x:/data/malice",
        "QUANTKIT_TOKEN": "secret",
    }
    command = [sys.executable, "-m", "quantkit.cli", "--version", "--verbose"]
    rows = _rows(
        subprocess.check_output(command, env={**os.environ, **settings}, text=True, cwd="/")
    )
    assert list(cache.iterdir()) == []
    assert rows["kernels"].startswith("none: /data/USER/x:/data/malice: ")
    assert rows["caches"].startswith(
        "~/my/cache (0 kB, writable); ~/.cache/huggingface/hub (0 kB, "
    )
    assert rows["settings"].startswith("CXX=/data/USER/x:/data/malice, ")
    assert "QUANTKIT_CACHE=~/my/cache" in rows["settings"]
    assert "secret" not in str(rows)


@pytest.mark.parametrize(
    ("quota", "limits", "expected"),
    [
        (
            0.5,
            [MemoryLimit(10**9, 10**8)],
            ["CPU limit 0.5", "limit 1 GB, 900 MB available", "1, the CPU limit rounded up to 1"],
        ),
        (None, [], ["no CPU limit", " available", "1, torch's default"]),
    ],
)
def test_limits_are_shown(
    quota: float | None,
    limits: list[MemoryLimit],
    expected: list[str],
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "cpu_quota", lambda: quota)
    monkeypatch.setattr(environment, "quota_threads", lambda: None if quota is None else 1)
    monkeypatch.setattr(memory, "memory_limits", lambda: limits)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # --threads sets both
        monkeypatch.delenv(name, raising=False)
    rows = _rows(run(capfd, "--version", "--verbose")[1])
    for name, end in zip(("processors", "memory", "threads"), expected, strict=True):
        assert rows[name].endswith(end)
    assert ("no limit" in rows["memory"]) == (not limits)
