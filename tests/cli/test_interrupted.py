"""Interruptions as users meet them: what is said, what is kept, who is writing, and what a
partial folder is.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from command import Capture, run, without_progress
from error_parts import raises
from partial import contents, interrupted, partial

import quantkit
from quantkit.data.files import EXCERPT
from quantkit.errors import BeingWrittenError, CheckpointError, InterruptedRunError, ResumeError
from quantkit.formats.output.destination import WRITER
from quantkit.jobs.convert import convert

pytestmark = pytest.mark.processes

SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)


@pytest.fixture(scope="module")
def left(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an interrupted conversion leaves."""
    return interrupted(quantkit.convert, demo_model, tmp_path_factory.mktemp("left") / "out")


@pytest.fixture
def dst(left: Path, tmp_path: Path) -> Path:
    """A destination that an interrupted run has begun."""
    shutil.copytree(left, partial(tmp_path / "out"))
    return tmp_path / "out"


def _gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# Who is writing


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("job", ["convert", "plan.convert"])
def test_who_is_writing_is_named(job: str, resume: bool, demo_model: Path, tmp_path: Path) -> None:
    calls = {"convert": quantkit.convert, "plan.convert": quantkit.plan.convert}
    errors: list[ResumeError] = []

    def progress(phase: str, done: int, total: int, unit: str) -> None:
        with pytest.raises(ResumeError) as caught:
            calls[job](demo_model, tmp_path / "out", resume=resume)
        errors.append(caught.value)

    quantkit.convert(demo_model, tmp_path / "out", progress=progress)
    (line,) = {str(error) for error in errors}
    assert str(partial(tmp_path / "out")) in line
    assert "pid" not in line
    assert {(type(error), error.retryable, error.exit_code) for error in errors} == {
        (BeingWrittenError, True, 6)
    }
    assert {path.name for path in (tmp_path / "out").iterdir()}.isdisjoint(
        {WRITER, ".quantkit-journal.jsonl"}
    )


@pytest.mark.parametrize(
    ("writer", "named"),
    [
        (f"{_gone()} {os.uname().nodename}", ""),
        (f"{os.getppid()} {os.uname().nodename}", f" (pid {os.getppid()})"),
        ("12 elsewhere", " (pid 12 on elsewhere)"),
        ("0 " + os.uname().nodename, ""),
        ("9" * 30 + " " + os.uname().nodename, ""),
        ("12 else\nwhere", ""),
        ("nobody", ""),
        ("", ""),
        (None, ""),
    ],
    ids=["gone", "running", "elsewhere", "zero", "huge", "lines", "words", "empty", "absent"],
)
def test_only_a_process_that_may_be_the_writer_is_named(
    writer: str | None, named: str, demo_model: Path, dst: Path
) -> None:
    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if writer is None:
            (partial(dst) / WRITER).unlink()
        else:
            (partial(dst) / WRITER).write_text(writer)
        with pytest.raises(ResumeError) as caught:
            quantkit.convert(demo_model, dst, resume=True)
        assert f"{partial(dst)}{named};" in str(caught.value)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(demo_model, dst, resume=True, progress=progress)


def test_one_that_was_interrupted_is_not_called_a_writer(demo_model: Path, dst: Path) -> None:
    (partial(dst) / WRITER).write_text(f"{os.getpid()} {os.uname().nodename}")
    with raises(InterruptedRunError, path=partial(dst), options=["resume"]) as caught:
        quantkit.convert(demo_model, dst)
    assert not caught.value.retryable


# A partial folder in place of a model


COMMANDS = [
    "inspect SRC",
    "verify SRC",
    "verify SRC MODEL",
    "verify MODEL SRC",
    "eval SRC",
    "generate SRC --prompt x",
    "quantize SRC DST --scheme int8",
    "convert SRC DST",
    "plan convert SRC DST",
    "bench SRC",
    "chat SRC",
    "doctor SRC",
    "doctor MODEL --against SRC",
    "generate MODEL --prompt x --draft SRC",
    "push SRC me/model",
]


def test_a_partial_folder_is_reported_for_what_it_is(
    demo_model: Path, dst: Path, tmp_path: Path, capfd: Capture
) -> None:
    places = {"SRC": partial(dst), "MODEL": demo_model, "DST": tmp_path / "new"}
    for command in COMMANDS:
        code, out, err = run(capfd, *(places.get(word, word) for word in command.split()))
        assert (code, out, err.count("\n")) == (3, "", 1), command
        assert err.startswith(f"quantkit: error: {partial(dst)}: "), command
        assert "convert" in err, command
        assert "--resume" in err, command


def test_under_another_name_it_is_the_same(dst: Path, tmp_path: Path) -> None:
    partial(dst).rename(tmp_path / "renamed")
    with raises(CheckpointError, "convert", path=tmp_path / "renamed", options=["resume"]):
        quantkit.open_checkpoint(tmp_path / "renamed")


def test_a_quantization_that_is_not_finished_can_be_continued(
    demo_model: Path, tmp_path: Path
) -> None:
    left = interrupted(
        functools.partial(quantkit.quantize, scheme="int8"), demo_model, tmp_path / "out"
    )
    options = ["resume", "accept_quality_loss"]
    with raises(CheckpointError, "quantize", path=left, options=options):
        quantkit.inspect(left)


@pytest.mark.parametrize(
    "line", [b"", b"[]\n", b'{"fingerprint": {"job": "rm -rf"}}\n', b"[" * 99_999]
)
def test_a_journal_that_says_nothing_names_no_job(line: bytes, dst: Path) -> None:
    (partial(dst) / ".quantkit-journal.jsonl").write_bytes(line)
    with raises(CheckpointError, path=partial(dst), options=["resume"]):
        quantkit.inspect(partial(dst))


def test_one_that_is_being_written_is_reported_as_that(demo_model: Path, tmp_path: Path) -> None:
    def progress(phase: str, done: int, total: int, unit: str) -> None:
        with raises(CheckpointError, str(partial(tmp_path / "out"))):
            quantkit.inspect(partial(tmp_path / "out"))

    quantkit.convert(demo_model, tmp_path / "out", progress=progress)


def test_a_finished_model_whose_journal_could_not_be_removed_is_a_model(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "out")
    (tmp_path / "out" / ".quantkit-journal.jsonl").write_text("")
    assert quantkit.inspect(tmp_path / "out").layers == 4


# Signals


RAISING = """
import os, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            {action}
sys.meta_path.insert(0, Finder())
from quantkit.cli.entry import main
main()
"""


def _process(code: str, *arguments: str | Path) -> tuple[int, str, str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, without_progress(done.stderr)


@SIGNALS
@pytest.mark.parametrize("module", ["click", "quantkit.cli.check", "torch"])
def test_an_interruption_of_an_import_is_reported_in_one_line(
    module: str, number: int, code: int, demo_model: Path, tmp_path: Path
) -> None:
    program = RAISING.format(module=module, action=f"os.kill(os.getpid(), {number})")
    assert _process(program, "verify", demo_model, demo_model) == (
        code,
        "",
        "quantkit: interrupted\n",
    )


@pytest.mark.slow
@SIGNALS
def test_an_interruption_that_an_import_swallows_is_not_lost(
    number: int, code: int, demo_model: Path
) -> None:
    swallowed = f"""
            try:
                os.kill(os.getpid(), {number})
            except BaseException:
                pass"""
    program = RAISING.format(module="torch", action=swallowed.strip())
    assert _process(program, "verify", demo_model, demo_model) == (
        code,
        "",
        "quantkit: interrupted\n",
    )


def test_signals_are_the_commands_and_not_the_librarys(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    during: list[Any] = []

    def progress(*now: object) -> None:
        during.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)])

    quantkit.convert(demo_model, tmp_path / "out", progress=progress)
    assert all(handlers == before for handlers in during)
    run(capfd, "inspect", tmp_path / "out")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_python_is_reported_too_what_is_kept(demo_model: Path, tmp_path: Path) -> None:
    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if done > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        quantkit.convert(demo_model, tmp_path / "out", source_check=False, progress=progress)
    (note,) = caught.value.__notes__
    assert str(partial(tmp_path / "out")) in note
    assert "`resume=True`" in note


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_stopped_before_the_first_tensor_leaves_nothing(
    error: type[BaseException], demo_model: Path, tmp_path: Path
) -> None:
    def progress(phase: str, done: int, total: int, unit: str) -> None:
        assert partial(tmp_path / "out").is_dir()
        raise error

    with pytest.raises(error) as caught:
        quantkit.convert(demo_model, tmp_path / "out", progress=progress)
    (note,) = caught.value.__notes__
    assert str(tmp_path) not in note
    assert not list(tmp_path.iterdir())


STEPS = pytest.mark.parametrize(
    ("step", "options"),
    [
        ("calibration.settings.GptqSettings.draw", ["--scheme", "int4-g64"]),
        ("bit_allocation.fit.Fit.choose_allocation", ["--target-bits", "5.5"]),
    ],
)


@STEPS
def test_an_interruption_of_calibration_says_what_is_kept(
    step: str,
    options: list[str],
    demo_model: Path,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"quantkit.{step}", stop)
    gptq = ["--samples", "4", "--length", "64"]
    command = ["quantize", demo_model, tmp_path / "out", *options, *gptq]
    code, out, err = run(capfd, *command)
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert err.startswith("quantkit: interrupted; ")
    assert str(tmp_path) not in err
    interrupted(quantkit.convert, demo_model, tmp_path / "out")
    code, out, err = run(capfd, *command, "--resume")
    assert (code, out, err.count("\n")) == (130, "", 1)
    assert err.startswith(f"quantkit: interrupted; {partial(tmp_path / 'out')} ")
    assert "--resume" in err


IGNORED = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""


def test_an_interruption_that_the_parent_ignores_is_ignored(demo_model: Path) -> None:
    program = IGNORED + RAISING.format(module="click", action="os.kill(os.getpid(), signal.SIGINT)")
    code, out, err = _process(program, "inspect", demo_model)
    assert (code, out[:5], err) == (0, str(demo_model)[:5], "")


def test_what_an_earlier_run_left_stays_when_its_resumption_is_stopped(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.jobs.output.writer.SAFE_POINT_BYTES", 50_000)
    dst = tmp_path / "out"
    before = contents(interrupted(quantkit.convert, demo_model, dst))

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.jobs.convert.convert._load_output_value", stop)
    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(demo_model, dst, resume=True)
    assert contents(partial(dst)).keys() >= before.keys()


def test_nothing_is_said_to_be_kept_that_is_not(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.jobs.convert.conversion.open_checkpoint", interrupt)
    code, out, err = run(capfd, "convert", demo_model, tmp_path / "out")
    assert (code, out, err) == (130, "", "quantkit: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_another_error_says_what_is_kept(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, calls = convert._load_output_value, iter(range(99))

    def fail(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise MemoryError
        return value(*arguments)

    monkeypatch.setattr(convert, "_load_output_value", fail)
    code, _, err = run(capfd, "convert", demo_model, tmp_path / "out")
    assert code == 1
    assert err.startswith("quantkit: internal error: MemoryError: ")
    assert err.count("\n") == 1
    for name in (str(partial(tmp_path / "out")), "--resume", "--debug"):
        assert name in err


STOPPED = """
import os, signal, sys
from quantkit.calibration.gptq_quantizer import GptqQuantizer
from quantkit.cli.entry import main
step = GptqQuantizer.solve
def stopped(self, block):
    if block.layer == 2 and "--resume" not in sys.argv:
        os.kill(os.getpid(), {number})
    return step(self, block)
GptqQuantizer.solve = stopped
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "first", "second"])
def test_processes_of_a_group_that_are_terminated_leave_what_can_be_resumed(
    who: str, demo_model: Path, tmp_path: Path
) -> None:
    """A launcher that is stopped stops all of them."""
    gptq = ["--scheme", "int4-g64", "--method", "gptq", "--samples", "8", "--length", "64"]
    options = [*gptq, "--calibration", EXCERPT]
    command = ["quantize", demo_model, tmp_path / "out", *options]
    is_stopped = {
        "all": "True",
        "first": "os.environ['RANK'] == '0'",
        "second": "os.environ['RANK'] == '1'",
    }[who]
    program = STOPPED.format(number=int(signal.SIGTERM)).replace("if ", f"if {is_stopped} and ", 1)
    processes = forked.group(2, program, *command)
    lines = [
        line
        for process in processes
        for line in process.stderr.splitlines()
        if line.startswith("quantkit: ")
    ]
    lines = without_progress("".join(f"{line}\n" for line in lines)).splitlines()
    (line,) = lines
    assert str(partial(tmp_path / "out")) in line
    assert "--resume" in line
    codes = [process.returncode for process in processes]
    if who == "second":
        assert codes == [9, 143]
        assert line.startswith("quantkit: error: ")
    else:
        assert codes[0] == 143
        assert codes[1] == 143 if who == "all" else codes[1] != 0
        assert line.startswith("quantkit: interrupted; ")
    if who != "all":
        return
    again = forked.group(2, program, *command, "--resume")
    assert [process.returncode for process in again] == [0, 0], again[0].stderr
    whole_command = ["quantize", demo_model, tmp_path / "whole", *options]
    whole = forked.group(2, program, *whole_command, "--resume")
    assert [process.returncode for process in whole] == [0, 0], whole[0].stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
