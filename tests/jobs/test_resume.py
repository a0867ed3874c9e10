"""Interrupted writes: nothing under the final name, and a resumed run gives the same bytes."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from command import Capture, run, without_progress
from partial import interrupted

import quantkit
from quantkit.data.files import EXCERPT
from quantkit.errors import (
    CheckpointError,
    DestinationError,
    InterruptedRunError,
    NoSpaceError,
    ResumeError,
)
from quantkit.formats.output import sink
from quantkit.formats.output.destination import OwnFolder
from quantkit.jobs.output import writer as output
from quantkit.jobs.output.writer import Writer

pytestmark = pytest.mark.processes

JOBS: dict[str, Callable[..., Any]] = {
    "convert-hf": lambda src, dst, **options: quantkit.convert(src, dst, **options),
    "convert-meta": lambda src, dst, **options: quantkit.convert(
        src, dst, to="meta", mp=2, **options
    ),
    "quantize": lambda src, dst, **options: quantkit.quantize(
        src, dst, "int4-g32", method="rtn", kv_cache="fp8", **options
    ),
    "gptq": lambda src, dst, **options: quantkit.quantize(
        src,
        dst,
        "int4-g64",
        method="gptq",
        kv_cache="fp8",
        calibration=EXCERPT,
        samples=24,
        length=128,
        **options,
    ),
}
CALLS = {
    "convert-hf": "quantkit.convert(src, dst, progress=progress, source_check=False)",
    "convert-meta": (
        "quantkit.convert(src, dst, to='meta', mp=2, progress=progress, source_check=False)"
    ),
    "quantize": (
        "quantkit.quantize(src, dst, 'int4-g32', method='rtn', kv_cache='fp8', progress=progress,"
        " source_check=False)"
    ),
    "gptq": (
        "quantkit.quantize(src, dst, 'int4-g64', method='gptq', kv_cache='fp8',"
        " calibration=EXCERPT, samples=24, length=128, progress=progress, source_check=False)"
    ),
}
CHILD = """
import os, signal, sys
import torch
import quantkit
from quantkit.calibration.cache_scales import CACHE_SCALES
from quantkit.calibration.importance import IMPORTANCE
from quantkit.data.files import EXCERPT
from quantkit.jobs.output import writer as output
from quantkit.jobs.output import target
output.SAFE_POINT_BYTES = 50_000
target.SHARD_BYTES = 300_000
torch.set_num_threads(1)  # sums of floats depend on it
src, dst, limit = sys.argv[1], sys.argv[2], float(sys.argv[3])

def progress(phase, done, total, unit):
    if phase not in (IMPORTANCE, CACHE_SCALES) and limit * total <= done < total:
        os.kill(os.getpid(), signal.SIGKILL)

"""


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SAFE_POINT_BYTES", 50_000)
    monkeypatch.setattr("quantkit.jobs.output.target.SHARD_BYTES", 300_000)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _partial(dst: Path) -> Path:
    return dst.with_name(dst.name + ".partial")


def _killed(job: str, src: Path, dst: Path, moment: float) -> None:
    """Run a job in another process until a share of its bytes is written."""
    assert forked.python(CHILD + CALLS[job], src, dst, str(moment)).returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole_contents(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, bytes]]:
    """What a job makes that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def contents(job: str) -> dict[str, bytes]:
        JOBS[job](demo_model, folder / job)
        return _contents(folder / job)

    return contents


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.35, 0.75])
@pytest.mark.parametrize("job", JOBS)
def test_a_killed_run_resumes_to_the_same_bytes(
    job: str,
    moment: float,
    demo_model: Path,
    tmp_path: Path,
    whole_contents: Callable[[str], dict[str, bytes]],
) -> None:
    killed = tmp_path / "killed"
    _killed(job, demo_model, killed, moment)
    assert not killed.exists()
    assert _partial(killed).is_dir()
    JOBS[job](demo_model, killed, resume=True)
    assert _contents(killed) == whole_contents(job)
    assert not _partial(killed).exists()


@pytest.mark.slow
def test_a_resumed_run_does_not_do_again_what_is_on_disk(demo_model: Path, tmp_path: Path) -> None:
    dst = tmp_path / "out"
    _killed("quantize", demo_model, dst, 0.6)
    reported: list[tuple[str, int, int, str]] = []
    JOBS["quantize"](demo_model, dst, resume=True, progress=lambda *now: reported.append(now))
    written = [(done, total) for phase, done, total, _ in reported if phase == "quantize"]
    assert written[0][0] > 0
    assert written[-1][0] == written[-1][1]


def test_another_source_of_the_same_names_sizes_and_times_is_noticed(
    demo_model: Path, tmp_path: Path
) -> None:
    source, dst = tmp_path / "source", tmp_path / "out"
    quantkit.convert(demo_model, source)
    forked.python(CHILD + CALLS["convert-hf"], source, dst, "0.6")
    weights = sorted(source.glob("*.safetensors"))[0]
    times = weights.stat()
    raw = bytearray(weights.read_bytes())
    data = 8 + int.from_bytes(raw[:8], "little")
    raw[data + 1 :: 2] = bytes(byte ^ 0x80 for byte in raw[data + 1 :: 2])  # the signs of bfloat16
    weights.write_bytes(raw)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ResumeError, match="changed source"):
        quantkit.convert(source, dst, resume=True)


def test_bytes_after_the_last_safe_point_are_not_trusted(demo_model: Path, tmp_path: Path) -> None:
    whole, dst = tmp_path / "whole", tmp_path / "out"
    quantkit.convert(demo_model, whole)
    _killed("convert-hf", demo_model, dst, 0.6)
    newest = sorted(_partial(dst).glob("*.safetensors"))[-1]
    with newest.open("ab") as file:
        file.write(b"torn" * 1000)
    with (_partial(dst) / ".quantkit-journal.jsonl").open("ab") as journal:
        journal.write(b'{"tensors": 99, "fil')
    quantkit.convert(demo_model, dst, resume=True)
    assert _contents(dst) == _contents(whole)


@pytest.mark.parametrize("damage", ["shorter", "changed"])
def test_a_partial_file_that_was_tampered_with_is_refused(
    damage: str, demo_model: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    _killed("convert-hf", demo_model, dst, 0.6)
    oldest = sorted(_partial(dst).glob("*.safetensors"))[0]
    content = oldest.read_bytes()
    oldest.write_bytes(
        content[:-1000] if damage == "shorter" else content[:-1] + bytes([content[-1] ^ 1])
    )
    with pytest.raises(ResumeError, match="was not written by the interrupted run"):
        quantkit.convert(demo_model, dst, resume=True)
    assert not dst.exists()


def _interrupt(monkeypatch: pytest.MonkeyPatch, demo_model: Path, dst: Path) -> None:
    """Leave a partial output behind, as Ctrl-C does."""

    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(demo_model, dst, progress=progress, source_check=False)
    assert _partial(dst).is_dir()


def test_an_interrupted_run_is_not_overwritten_unrequested(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupt(monkeypatch, demo_model, tmp_path / "out")
    with pytest.raises(InterruptedRunError, match="`resume=True`"):
        quantkit.convert(demo_model, tmp_path / "out")


def test_resume_refuses_other_options(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupt(monkeypatch, demo_model, tmp_path / "out")
    with pytest.raises(ResumeError, match="changed option dtype"):
        quantkit.convert(demo_model, tmp_path / "out", dtype="fp32", resume=True)
    with pytest.raises(ResumeError, match="changed job"):
        quantkit.quantize(demo_model, tmp_path / "out", "int8", resume=True)


def test_of_options_in_one_another_the_changed_ones_are_named(
    demo_model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The people of the United States, and of the world. " * 200)
    given: dict[str, Any] = {
        "method": "gptq",
        "calibration": text,
        "length": 32,
        "source_check": False,
    }

    def interrupt(phase: str, done: int, *_: object) -> None:
        if (phase, done) == ("quantize", 14):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantkit.quantize(
            demo_model, tmp_path / "out", "int4-g64", samples=8, progress=interrupt, **given
        )
    with pytest.raises(
        ResumeError, match=r"found changed option calibration \([a-z_0-9, ]*samples[a-z_0-9, ]*\)\)"
    ):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", samples=9, resume=True, **given)
    with pytest.raises(
        ResumeError, match=r"found changed option method, option recipe \(default\)\)"
    ):
        quantkit.quantize(demo_model, tmp_path / "out", "int8", source_check=False, resume=True)


@pytest.mark.slow
def test_gptq_records_the_number_of_threads_and_is_not_resumed_with_another(
    demo_model: Path, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "calibration": EXCERPT,
        "samples": 4,
        "length": 64,
        "source_check": False,
    }
    made = quantkit.quantize(demo_model, tmp_path / "whole", "int4-g64", **arguments)
    assert made.manifest["computed_by"]["number of threads"] == torch.get_num_threads() == 1
    assert made.manifest["computed_by"]["torch"] == torch.__version__
    interrupted(
        lambda *a, **b: quantkit.quantize(*a, "int4-g64", **arguments | b),
        demo_model,
        tmp_path / "out",
    )
    torch.set_num_threads(2)
    try:
        with pytest.raises(ResumeError, match="found changed number of threads"):
            quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", **arguments, resume=True)
    finally:
        torch.set_num_threads(1)


def test_resume_refuses_a_changed_source(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo_model, source)
    _interrupt(monkeypatch, source, tmp_path / "out")
    os.utime(source / "consolidated.01.pth", (1, 1))
    with pytest.raises(ResumeError, match="changed source"):
        quantkit.convert(source, tmp_path / "out", resume=True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_writer_is_locked_out(
    resume: bool, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupt(monkeypatch, demo_model, tmp_path / "out")
    with (_partial(tmp_path / "out") / ".quantkit-journal.jsonl").open("ab") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(ResumeError, match="is writing to"):
            quantkit.convert(demo_model, tmp_path / "out", resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_disk_that_fills_up_leaves_a_resumable_run(
    job: str,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole_contents: Callable[[str], dict[str, bytes]],
) -> None:
    dst = tmp_path / "out"
    expected = whole_contents(job)
    real = sink._GrowingFile.write
    written = 0

    def full(self: Any, data: bytes | memoryview) -> None:
        nonlocal written
        written += len(data)
        if written > 700_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, data)

    monkeypatch.setattr(sink._GrowingFile, "write", full)
    with pytest.raises(NoSpaceError, match=r"disk is full.*`resume=True`"):
        JOBS[job](demo_model, dst)
    assert not dst.exists()
    monkeypatch.setattr(sink._GrowingFile, "write", real)
    JOBS[job](demo_model, dst, resume=True)
    assert _contents(dst) == expected


def test_too_little_space_is_reported_before_any_work(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(
        NoSpaceError, match=r"too little space.*1 MB free, expected \d+(\.\d)? MB"
    ) as caught:
        quantkit.convert(demo_model, tmp_path / "out")
    assert caught.value.retryable
    assert not list(tmp_path.iterdir())


def test_what_is_no_disk_cannot_be_written(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc, whose size is 0."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 0))
    with pytest.raises(DestinationError, match="cannot be written: it is not on a disk"):
        quantkit.convert(demo_model, tmp_path / "out")


def test_a_source_that_changes_meanwhile_is_noticed(demo_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(demo_model, source)

    def touch(phase: str, done: int, total: int, unit: str) -> None:
        if done == total:
            os.utime(source / "consolidated.00.pth", (1, 1))

    with pytest.raises(CheckpointError, match="changed while it was read"):
        quantkit.convert(source, tmp_path / "out", progress=touch)
    assert not (tmp_path / "out").exists()
    assert not _partial(tmp_path / "out").exists()


def test_a_destination_that_appears_meanwhile_is_left_alone(
    demo_model: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "out"

    def appear(phase: str, done: int, total: int, unit: str) -> None:
        dst.mkdir(exist_ok=True)

    with pytest.raises(DestinationError, match="appeared while writing"):
        quantkit.convert(demo_model, dst, progress=appear)
    assert not list(dst.iterdir())


def test_a_failed_write_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    files = sink.Sink(OwnFolder(folder), {}, {})
    folder.rmdir()
    files.append("a", b"1")
    with pytest.raises(DestinationError):
        files.sync()
    with pytest.raises(DestinationError):
        files.close()


SLOW = (
    "import sys, time\n"
    "from quantkit.cli.entry import main\n"
    "from quantkit.formats.output import sink\n"
    "from quantkit.jobs.output import target, writer as output\n"
    "output.SAFE_POINT_BYTES = 50_000\n"
    "target.SHARD_BYTES = 300_000\n"
    "append, steps = sink.Sink.append, iter([0.1] * 8)\n"
    "def slowly(self, name, data):\n"
    "    time.sleep(next(steps, 60))\n"  # it must not be done before the signal comes
    "    append(self, name, data)\n"
    "sink.Sink.append = slowly\n"
    "main()\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_an_interrupted_command_says_what_is_kept_and_can_be_resumed(
    number: signal.Signals, code: int, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    whole, dst = tmp_path / "whole", tmp_path / "out"
    quantkit.convert(demo_model, whole)
    child = subprocess.Popen(
        forked.command("-c", SLOW, "convert", demo_model, dst),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while child.poll() is None and not any(
        file.stat().st_size for file in _partial(dst).glob("*.safetensors")
    ):
        time.sleep(0.02)
    time.sleep(0.3)
    child.send_signal(number)
    out, err = child.communicate(timeout=300)
    assert (child.returncode, out) == (code, "")
    assert (
        without_progress(err) == f"quantkit: interrupted; {_partial(dst)} is kept: add --resume\n"
    )
    assert not dst.exists()
    code, out, err = run(capfd, "convert", demo_model, dst, "--resume")
    assert (code, out.partition(":")[0], err) == (0, f"wrote {dst}", "")
    assert _contents(dst) == _contents(whole)


def test_an_error_of_the_source_leaves_nothing_behind(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Writer.put

    def fail(self: Writer, name: str, value: Any, record: Any = None) -> None:
        real(self, name, value, record)
        raise CheckpointError("the source is damaged")

    monkeypatch.setattr(Writer, "put", fail)
    with pytest.raises(CheckpointError):
        quantkit.convert(demo_model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_manifest_lists_every_file_with_its_hash(demo_model: Path, tmp_path: Path) -> None:
    import hashlib

    quantkit.convert(demo_model, tmp_path / "out")
    listed = json.loads((tmp_path / "out" / "quantkit.json").read_text())["files"]
    found = {
        name: hashlib.sha256(content).hexdigest()
        for name, content in _contents(tmp_path / "out").items()
        if name != "quantkit.json"
    }
    assert listed == found
