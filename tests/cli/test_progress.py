"""Progress: plain lines where nobody looks on, a bar that makes room on a terminal."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from command import PROGRESS, Capture
from partial import interrupted
from terminal import on_terminal, screen

import quantkit
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress
from quantkit.cli.job_steps import JobSteps
from quantkit.cli.output import note
from quantkit.cli.progress import ProgressDisplay
from quantkit.data.files import EXCERPT


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _display(clock: Clock) -> ProgressDisplay:
    """Made within the test: the streams of fixtures are others."""
    return ProgressDisplay(clock=clock, ticking=False)


def _on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of the standard streams."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(sys, "stdout", made)
    return made


def _said(capfd: Capture) -> list[str]:
    return capfd.readouterr().err.splitlines()


class ContestedLock:
    """A lock for which another thread waits: when it is free, `waiting` runs."""

    def __init__(self) -> None:
        self.waiting: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        waiting = self.waiting
        self.waiting = lambda: None
        waiting()


# Plain lines


def test_a_short_phase_is_one_line(clock: Clock, capfd: Capture) -> None:
    display = _display(clock)
    for done in range(25):
        display("gate", done, 24, "layers")
        clock.passes(1)
    assert _said(capfd) == ["quantkit: gate: 0/24 layers"]


def test_a_long_phase_reports_every_30_seconds_how_far_it_is(clock: Clock, capfd: Capture) -> None:
    display = _display(clock)
    for done in range(24):
        display("quantize", done, 24, "layers")
        clock.passes(10)
    assert _said(capfd) == [
        "quantkit: quantize: 0/24 layers",
        "quantkit: quantize: 3/24 layers, 3:30 left",
        "quantkit: quantize: 6/24 layers, 3:00 left",
        "quantkit: quantize: 9/24 layers, 2:30 left",
        "quantkit: quantize: 12/24 layers, 2:00 left",
        "quantkit: quantize: 15/24 layers, 1:30 left",
        "quantkit: quantize: 18/24 layers, 1:00 left",
        "quantkit: quantize: 21/24 layers, 0:30 left",
    ]


def test_it_speaks_also_while_the_job_says_nothing(clock: Clock, capfd: Capture) -> None:
    display = _display(clock)
    display("quantize", 0, 4, "layers")
    clock.passes(60)
    display("quantize", 1, 4, "layers")
    for _ in range(45):
        clock.passes(1)
        display.tick()
    assert _said(capfd) == [
        "quantkit: quantize: 0/4 layers",
        "quantkit: quantize: 1/4 layers, 3:00 left",
        "quantkit: quantize: 1/4 layers, 2:30 left",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_shown_after_the_end(
    terminal: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: io.StringIO = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    display = _display(clock)
    lock = ContestedLock()
    monkeypatch.setattr(display, "_lock", lock)
    after_the_end: list[int] = []

    def tick() -> None:
        after_the_end.append(len(stream.getvalue()))
        display.tick()

    with display:
        display("quantize", 1, 4, "layers")
        clock.passes(60)
        lock.waiting = tick
    assert after_the_end == [len(stream.getvalue())]


def test_each_phase_has_a_line_when_it_begins(clock: Clock, capfd: Capture) -> None:
    display = _display(clock)
    for phase in ("check of the source", "convert"):
        for done in range(3):
            display(phase, done, 2, "layers")
    assert _said(capfd) == [
        "quantkit: check of the source: 0/2 layers",
        "quantkit: convert: 0/2 layers",
    ]


def test_a_phase_of_several_stretches_has_one_line(clock: Clock, capfd: Capture) -> None:
    display = _display(clock)
    for total in (6, 5, 6):
        for done in range(total):
            display("tasks", done, total, "requests")
    assert _said(capfd) == ["quantkit: tasks: 0/6 requests"]


def test_the_time_left_does_not_count_what_was_there(clock: Clock, capfd: Capture) -> None:
    display = _display(clock)
    display("quantize", 90, 100, "layers")
    clock.passes(3600)
    display("quantize", 91, 100, "layers")
    assert _said(capfd)[-1] == "quantkit: quantize: 91/100 layers, 9:00:00 left"


def test_of_several_processes_the_others_are_silent(clock: Clock, capfd: Capture) -> None:
    with ProgressDisplay(show=False, clock=clock) as progress:
        progress("gate", 0, 2, "layers")
        clock.passes(60)
        progress.tick()
    assert _said(capfd) == []


def test_a_stderr_that_takes_nothing_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with _display(clock) as progress:
            progress("gate", 0, 2, "layers")
            progress("verify", 0, 2, "layers")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # for what is left of it


# The steps of a job


def test_of_a_job_the_time_left_is_that_of_all_steps(clock: Clock, capfd: Capture) -> None:
    display = _display(clock)
    display.expect({"check": 60, "quantize": 600, "gate": 120})
    display("check", 0, 2, "layers")
    clock.passes(60)
    display("quantize", 0, 10, "linears")
    clock.passes(60)
    display("quantize", 1, 10, "linears")
    clock.passes(540)
    display("gate", 0, 4, "layers")
    clock.passes(90)
    display("gate", 3, 4, "layers")
    assert _said(capfd) == [
        "quantkit: step 1 of 3, check: 0/2 layers, 13:00 left",
        "quantkit: step 2 of 3, quantize: 0/10 linears, 12:00 left",
        "quantkit: step 2 of 3, quantize: 1/10 linears, 11:00 left",
        "quantkit: step 3 of 3, gate: 0/4 layers, 2:00 left",
        "quantkit: step 3 of 3, gate: 3/4 layers, 0:30 left",
    ]


def test_later_steps_are_expected_to_be_as_slow_as_what_was_seen() -> None:
    steps = JobSteps({"quantize": 100, "gate": 100}, 0)
    steps.report("quantize", 0, 0)
    assert steps.estimate_remaining_seconds(0) == pytest.approx(200)
    steps.report("quantize", 0.5, 200)  # four times as slow as estimated
    assert (
        300 < steps.estimate_remaining_seconds(200) < 600
    )  # 200 of its own, and more than the 100 that the gate was estimated to take
    steps.report("gate", 0, 400)
    assert 200 < steps.estimate_remaining_seconds(400) < 400
    steps.report("gate", 0.5, 410)  # but the gate is fast
    assert steps.estimate_remaining_seconds(410) == pytest.approx(10)


def test_the_share_of_a_job_never_goes_back_and_ends_only_with_the_job() -> None:
    steps, shares = JobSteps({"quantize": 10, "gate": 10}, 0), []
    reports = [
        ("quantize", 0, 0),
        ("quantize", 0.9, 9),
        ("quantize", 0.9, 90),
        ("gate", 0, 100),
        ("gate", 1, 120),
    ]
    for phase, done, now in reports:
        steps.report(phase, done, now)
        shares.append(steps.share(now))
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 0.99


def test_what_an_interrupted_run_did_counts_neither_in_steps_nor_in_time() -> None:
    steps = JobSteps({"check": 10, "quantize": 100, "gate": 10}, 0)
    steps.report("check", 0, 0)
    steps.report("calibrate", 0, 10)
    assert steps.label("calibrate") == "calibrate"
    assert steps.label("quantize") == "step 2 of 3, quantize"
    steps.report("quantize", 0.8, 30)
    assert steps.estimate_remaining_seconds(30) == pytest.approx(20 + 10)


def test_a_phase_in_several_rounds_does_not_go_back() -> None:
    steps = JobSteps({"samples": 30, "quantize": 100}, 0)
    steps.report("samples", 0, 0)
    steps.report("samples", 1, 20)
    assert steps.estimate_remaining_seconds(20) == pytest.approx(100)
    steps.report("samples", 0, 21)
    assert steps.estimate_remaining_seconds(21) <= 100


# A bar


def test_a_bar_reports_phase_count_and_time_left_and_is_gone_at_the_end(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _on_terminal(monkeypatch)
    with _display(clock) as progress:
        progress("quantize", 12, 24, "layers")
        clock.passes(20)
        progress("quantize", 18, 24, "layers")
        (line,) = screen(terminal.getvalue())
        assert line.startswith("quantize:  75%|")
        assert line.endswith("| 18/24 layers, 0:20 left")
        clock.passes(5)
        progress.tick()
        assert screen(terminal.getvalue())[0].endswith("| 18/24 layers, 0:15 left")
        progress("gate", 0, 6, "layers")
        (line,) = screen(terminal.getvalue())
        assert line.startswith("gate:   0%|")
        assert line.endswith("| 0/6 layers")
    assert screen(terminal.getvalue()) == [""]


def test_what_is_printed_while_a_bar_is_shown_stands_on_lines_of_its_own(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _on_terminal(monkeypatch)
    quantkit_log = logging.getLogger("quantkit")
    monkeypatch.setattr(quantkit_log, "handlers", [])
    monkeypatch.setattr(quantkit_log, "propagate", quantkit_log.propagate)
    from quantkit.cli.main import _show_log

    _show_log()
    with _display(clock) as progress:
        progress("quantize", 1, 24, "layers")
        note(
            Message(
                "one of the ", Option("length"), " of a line, and ", Option("resume", value=True)
            )
        )
        quantkit_log.info("another")
        lines = screen(terminal.getvalue())
        assert lines[:2] == [
            "quantkit: note: one of the --length of a line, and --resume",
            "quantkit: note: another",
        ]
        assert lines[2].startswith("quantize:   4%|")
        assert lines[2].endswith("| 1/24 layers")
        assert len(lines) == 3
    assert screen(terminal.getvalue())[2:] == [""]


@pytest.mark.parametrize(
    ("seconds", "reported"), [(0.2, "0:01"), (40, "0:40"), (725, "12:05"), (3723, "1:02:03")]
)
def test_times_are_read_off_a_clock(
    seconds: float, reported: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _on_terminal(monkeypatch)
    with _display(clock) as display:
        display("gate", 0, 2, "layers")
        clock.passes(seconds)
        display("gate", 1, 2, "layers")
        assert screen(terminal.getvalue())[0].endswith(f"| 1/2 layers, {reported} left")


# Commands


def test_a_command_leaves_nothing_but_its_result_on_a_terminal(
    demo_model: Path, tmp_path: Path
) -> None:
    code, text = on_terminal("convert", demo_model, "out", cwd=tmp_path)
    assert code == 0
    drawn = [part for part in text.split("\r") if "%|" in part]
    assert drawn[0].startswith("step 1 of 3, check of the source: ")
    assert drawn[-1].startswith("step 3 of 3, exact: ")
    shares = [int(re.search(r"(\d+)%\|", part)[1]) for part in drawn]  # type: ignore[index]
    assert shares == sorted(shares)
    assert max(shares) <= 99
    assert "4 layers" in text
    line, end = screen(text)
    assert line.startswith("wrote out: ")
    assert end == ""


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 100), (40, 50)])
def test_a_terminal_of_any_size_shows_a_bar(
    rows: int, columns: int, demo_model: Path, tmp_path: Path
) -> None:
    code, text = on_terminal("convert", demo_model, "out", cwd=tmp_path, rows=rows, columns=columns)
    assert code == 0
    drawn = [line for line in re.split(r"[\r\n]+", text) if "layers" in line]
    assert drawn
    assert max(map(len, drawn)) < (columns or 80)


@pytest.mark.slow
def test_the_table_of_trequests_begins_on_a_line_of_its_own_and_no_other_bars_are_shown(
    demo_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "winogrande.jsonl").write_text(
        "\n".join(
            json.dumps(
                {
                    "sentence": f"The _ of the {thing}.",
                    "option1": "people",
                    "option2": "horse",
                    "answer": "1",
                }
            )
            for thing in ("world", "country", "union")
        )
    )
    code, text = on_terminal(
        "eval", demo_model, "--tasks", "winogrande", "--task-data", tmp_path, cwd=tmp_path
    )
    assert code == 0, text
    bars = {
        frame.split(":  ")[0] for frame in text.replace("\n", "\r").split("\r") if "%|" in frame
    }
    assert bars == {"data of tasks", "mini-en: tasks"}
    assert "it/s" not in text
    lines = [line for line in screen(text) if line]
    assert lines[0].startswith("Tasks: ")
    assert lines[1].startswith("model ")
    assert lines[-1].lstrip("| ").startswith("mini-en ")


GPTQ = ["--scheme", "int4-g64", "--method", "gptq", "--samples", "8", "--length", "64"]


@pytest.mark.slow
def test_a_resumed_gptq_run_reports_apart_what_was_there(demo_model: Path, tmp_path: Path) -> None:
    def job(src: Path, dst: Path, **given: Any) -> None:
        quantkit.quantize(
            src,
            dst,
            "int4-g64",
            method="gptq",
            calibration=EXCERPT,
            samples=8,
            length=64,
            **{**given, "source_check": False},
        )

    interrupted(job, demo_model, tmp_path / "out", share=0.6)
    reported: list[tuple[str, int, int, str]] = []
    job(demo_model, tmp_path / "out", resume=True, progress=lambda *now: reported.append(now))
    phases = list(dict.fromkeys(phase for phase, *_ in reported))
    assert [phase for phase in phases if phase != "sha256 of the source"] == [
        "check of what is there",
        "calibrate",
        "quantize",
        "gate",
    ]
    passed = [now for now in reported if now[0] == "calibrate"]
    assert passed == [
        ("calibrate", done, 14, "linears") for done in (0, 3, 4, 6, 7, 10, 11, 13, 14)
    ]
    solved = [now for now in reported if now[0] == "quantize"]
    assert solved == [
        ("quantize", done, 28, "linears") for done in (14, 17, 18, 20, 21, 24, 25, 27, 28)
    ]


@pytest.mark.slow
def test_of_a_group_the_first_process_reports(demo_model: Path, tmp_path: Path) -> None:
    command = "from quantkit.cli.main import main; main()"
    given = ["quantize", demo_model, tmp_path / "out", *GPTQ, "--calibration", EXCERPT]
    first, second = forked.group(2, command, *given)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    phases = [found["phase"] for found in PROGRESS.finditer(first.stderr)]
    assert phases[:2] == ["check of the source", "quantize"]
    assert phases[-1] == "gate"
    assert not PROGRESS.search(second.stderr)


@pytest.mark.slow
def test_only_what_changes_is_reported(demo_model: Path, tmp_path: Path) -> None:
    reported: dict[str, list[tuple[str, int, int, str]]] = {}

    def listening(name: str) -> Progress:
        return lambda *now: reported.setdefault(name, []).append(now)

    quantkit.convert(demo_model, tmp_path / "out", progress=listening("convert"))
    quantkit.quantize(demo_model, tmp_path / "int8", "int8", progress=listening("quantize"))
    quantkit.verify(demo_model, tmp_path / "out", progress=listening("verify"))
    quantkit.evaluate(demo_model, progress=listening("evaluate"))
    assert len(reported) == 4
    for events in reported.values():
        assert all(one != after for one, after in itertools.pairwise(events))


def test_a_pace_stands_next_to_what_is_done(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProgressDisplay(ticking=False, details=lambda: "12 tokens/s") as progress:
        progress("generate", 0, 2, "prompts")
    assert capfd.readouterr().err == "quantkit: generate: 0/2 prompts, 12 tokens/s\n"
    terminal = _on_terminal(monkeypatch)
    with ProgressDisplay(ticking=False, details=lambda: "12 tokens/s") as progress:
        progress("generate", 0, 2, "prompts")
        assert screen(terminal.getvalue())[0].endswith("| 0/2 prompts, 12 tokens/s")
