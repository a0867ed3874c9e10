"""Where an output may go, and which other files of the source it needs until the end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from command import Capture, run
from error_parts import raises
from partial import contents, interrupted, partial

import quantkit
from quantkit.errors import CheckpointError, ResumeError
from quantkit.jobs.output import writer as output

COMMANDS = ("convert", "quantize --scheme=int8", "plan convert", "plan quantize --scheme=int8")
NO_NAMES = (".", "..", "", "/", "there/..", "out.partial", "x" * 300)
NOT_NEW = ("there/",)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("dst", NO_NAMES + NOT_NEW)
def test_a_destination_that_is_no_new_name(
    dst: str,
    command: str,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    code, out, err = run(capfd, *command.split(), demo_model, dst)
    assert (code, out, err.count("\n")) == (2 if dst in NO_NAMES else 5, "", 1)
    assert err.startswith("quantkit: error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())


def test_a_destination_below_a_file(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "file").touch()
    assert run(capfd, "convert", demo_model, tmp_path / "file" / "out")[0] == 5


def test_it_is_refused_before_anything_is_opened(tmp_path: Path, capfd: Capture) -> None:
    code, _, err = run(capfd, "convert", tmp_path / "no such source", ".")
    assert code == 2, err
    assert "no such source" not in err


def test_an_output_is_not_built_where_its_source_is(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    shutil.copytree(demo_model, tmp_path / "out.partial")
    before = contents(tmp_path / "out.partial")
    code, _, err = run(capfd, "convert", tmp_path / "out.partial", tmp_path / "out", "--resume")
    assert code == 2, err
    assert contents(tmp_path / "out.partial") == before


def test_a_loop_of_links_is_a_destination_that_is_there(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    (tmp_path / "out").symlink_to("out")
    assert run(capfd, "convert", demo_model, tmp_path / "out")[0] == 5


@pytest.fixture
def source(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(output, "SAFE_POINT_BYTES", 50_000)
    folder = tmp_path / "source"
    shutil.copytree(demo_model, folder)
    (folder / "LICENSE").write_text("as it is")
    return folder


def _change(source: Path, how: str) -> str:
    """Change a file that is copied; how the error will name it."""
    path = source / ("USE_POLICY.md" if how == "new" else "LICENSE")
    times = None if how in ("new", "gone") else path.stat()
    if how == "gone":
        path.unlink()
    else:
        path.write_text("as it was")
    if times is not None:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return path.name


@pytest.mark.parametrize("how", ["changed", "gone", "new"])
def test_a_run_is_not_resumed_with_other_files_next_to_the_weights(
    how: str, source: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "out"
    interrupted(quantkit.convert, source, dst)
    name = _change(source, how)
    with raises(ResumeError, path=partial(dst), found=f"changed file {name}"):
        quantkit.convert(source, dst, resume=True)
    assert partial(dst).is_dir()


def test_another_tokenizer_is_noticed(source: Path, tmp_path: Path) -> None:
    hf, dst = tmp_path / "hf", tmp_path / "out"
    quantkit.convert(source, hf)
    interrupted(lambda *a, **b: quantkit.quantize(*a, "int8", **b), hf, dst)
    tokenizer = hf / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with raises(ResumeError, path=partial(dst), found="changed file tokenizer.json"):
        quantkit.quantize(hf, dst, "int8", resume=True)


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_file_next_to_the_weights_that_changes_meanwhile_is_noticed(
    how: str, source: Path, tmp_path: Path
) -> None:
    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if done == total:
            _change(source, how)

    with raises(CheckpointError, path=source / "LICENSE"):
        quantkit.convert(source, tmp_path / "out", source_check=False, progress=progress)
    assert not (tmp_path / "out").exists()
