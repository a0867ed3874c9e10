"""``--threads``, which all commands on models have."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from command import Capture, run

from quantkit.cli.main import quantkit

COMMANDS = {
    "demo",
    "inspect",
    "doctor",
    "convert",
    "quantize",
    "refine",
    "imatrix",
    "verify",
    "eval",
    "generate",
    "chat",
    "serve",
    "bench",
}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DYNAMIC"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _has_option(command: click.Command) -> bool:
    return [parameter.name for parameter in command.params].count("threads") == 1


def test_commands_on_models_have_it() -> None:
    assert {name for name, command in quantkit.commands.items() if _has_option(command)} == COMMANDS
    plan = quantkit.commands["plan"]
    assert isinstance(plan, click.Group)
    assert all(map(_has_option, plan.commands.values()))


def test_a_number_out_of_range_is_refused(capfd: Capture) -> None:
    path_counts = dict.fromkeys(COMMANDS, 1) | {"demo": 0}
    path_counts |= dict.fromkeys(("convert", "quantize", "refine", "imatrix"), 2)
    for name, count in path_counts.items():
        code, out, err = run(capfd, name, *["a"] * count, "--threads", "0")
        assert (code, out) == (2, ""), name
        assert err.startswith("quantkit: error: --threads "), name
        assert "found 0, expected 1 to " in err, name


@pytest.mark.slow
def test_a_model_records_the_number_and_is_not_accepted_with_another(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    command = (
        "quantize",
        demo_model,
        tmp_path / "out",
        "--scheme",
        "int4-g64",
        "--method",
        "rtn",
        "--threads",
    )
    assert run(capfd, *command, "2")[0] == 0
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["computed_by"]["number of threads"] == 2
    assert run(capfd, *command, "2", "--if-exists", "skip")[0] == 0
    code, _, err = run(capfd, *command, "1", "--if-exists", "skip")
    assert code == 5
    assert "number of threads" in err


def test_the_demo_computes_on_one_thread_unless_more_are_requested(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def stop(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.evals.demo._run", stop)
    torch.set_num_threads(2)
    assert run(capfd, "demo")[0] == run(capfd, "demo", "--threads", "3")[0] == 130
    assert seen == [1, 3]
