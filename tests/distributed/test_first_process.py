"""Several processes, of which the first works and the others wait for it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest
from command import Capture, run
from error_parts import raises
from partial import contents, interrupted, partial, rewrite_last

import quantkit
from quantkit.data.files import EXCERPT
from quantkit.errors import ResumeError
from quantkit.formats.output.destination import WRITER

pytestmark = pytest.mark.processes

GPTQ: dict[str, Any] = {"method": "gptq", "calibration": EXCERPT, "samples": 24, "length": 64}


def _reported(all_: list[subprocess.CompletedProcess[str]]) -> list[str]:
    """The errors that quantkit tells on stderr; torch has words of its own there for a lost
    process.
    """
    return [
        line
        for one in all_
        for line in one.stderr.splitlines()
        if line.startswith("quantkit: error: ")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert --dtype fp32", "quantize --scheme int8"])
def test_one_works_and_the_other_exits_as_it_does(
    command: str, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    name, *options = command.split()
    first, second = forked.group(2, forked.COMMAND, name, demo_model, tmp_path / "two", *options)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.startswith(f"wrote {tmp_path / 'two'}: ")
    assert first.stdout.count("\n") == (
        2 if name == "quantize" else 1
    )  # with what would make the output smaller
    assert (second.stdout, second.stderr) == ("", "")
    assert run(capfd, name, demo_model, tmp_path / "one", *options)[0] == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_an_error_is_reported_once_and_is_that_of_both(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    both = forked.group(
        2, forked.COMMAND, "quantize", demo_model, tmp_path / "out", "--scheme", "int8"
    )
    assert [process.returncode for process in both] == [5, 5]
    (line,) = _reported(both)
    assert line.startswith(f"quantkit: error: {tmp_path / 'out'}: ")


@pytest.mark.slow
def test_waiting_has_no_limit_of_time() -> None:
    """Neither for the end of the first, nor where it says what an earlier run has left."""
    code = (
        "import time, torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from functools import partial\n"
        "from quantkit.cli.processes import join_group\n"
        "dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=2))\n"
        "with join_group(device='cpu') as group:\n"
        "    time.sleep(2.5 * group.is_rank0)\n"
        "    print(sorted(group.broadcast_from_rank0({'a'} if group.is_rank0 else {'b'})))\n"
        "    group.wait()\n"
        "    time.sleep(2.5 * group.is_rank0)\n"
    )
    both = forked.group(2, code)
    for process in both:
        assert (process.returncode, process.stdout) == (0, "['a']\n"), process.stderr


@pytest.mark.slow
def test_a_run_of_one_process_is_not_resumed_by_two(demo_model: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    interrupted(lambda *a, **b: quantkit.quantize(*a, "int4-g64", **GPTQ, **b), demo_model, dst)
    before = contents(partial(dst))
    before.pop(WRITER)
    options = ["--scheme", "int4-g64", "--resume"]
    options += [f"--{name}={value}" for name, value in GPTQ.items()]
    both = forked.group(2, forked.COMMAND, "quantize", demo_model, dst, *options)
    assert both[0].returncode == 6
    assert both[1].returncode != 0
    (reported,) = _reported(both)
    assert "number of processes" in reported
    after = contents(partial(dst))
    after.pop(WRITER)
    assert after == before


@pytest.mark.slow
def test_both_accept_an_output_that_both_have_made(demo_model: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    options = [
        "--scheme",
        "int4-g64",
        "--if-exists",
        "skip",
        *(f"--{name}={value}" for name, value in GPTQ.items()),
    ]
    for beginning in f"wrote {dst}: ", f"{dst} ":
        first, second = forked.group(2, forked.COMMAND, "quantize", demo_model, dst, *options)
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert first.stdout.startswith(beginning)
        assert (second.stdout, second.stderr) == ("", "")
    (dst / "README.md").write_text("mine")
    both = forked.group(2, forked.COMMAND, "quantize", demo_model, dst, *options)
    assert [process.returncode for process in both] == [5, 5]
    (reported,) = _reported(both)
    assert "README.md" in reported


def test_a_run_on_another_kind_of_device_is_not_resumed(demo_model: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    folder = interrupted(
        lambda *a, **b: quantkit.quantize(*a, "int4-g64", **GPTQ, **b), demo_model, dst, share=0.3
    )
    begun = (folder / ".quantkit-journal.jsonl").read_bytes().splitlines(keepends=True)[0]
    assert json.loads(begun)["fingerprint"]["kind of device"] == "cpu"
    (folder / ".quantkit-journal.jsonl").write_bytes(begun)
    rewrite_last(folder, lambda entry: entry["fingerprint"].update({"kind of device": "cuda"}))
    with raises(ResumeError, found="changed kind of device"):
        quantkit.quantize(demo_model, dst, "int4-g64", **GPTQ, resume=True)
