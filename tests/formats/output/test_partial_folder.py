"""What somebody else put into a partial folder, or made of its journal: refused, and nothing
outside is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from command import Capture, run
from error_parts import raises
from partial import Change, contents, interrupted, no_hang, partial, rewrite_last

import quantkit
from quantkit.errors import DestinationError, ResumeError
from quantkit.jobs.output import target
from quantkit.jobs.output import writer as output

JOURNAL = ".quantkit-journal.jsonl"
SECRET = b"somebody's only copy"


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "SAFE_POINT_BYTES", 50_000)
    monkeypatch.setattr(target, "SHARD_BYTES", 300_000)


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """A pipe that is opened without care waits for its other end."""
    with no_hang():
        yield


@pytest.fixture(scope="module")
def left(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an interrupted conversion leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "SAFE_POINT_BYTES", 50_000)
        patch.setattr(target, "SHARD_BYTES", 300_000)
        return interrupted(quantkit.convert, demo_model, tmp_path_factory.mktemp("left") / "out")


@pytest.fixture
def dst(left: Path, tmp_path: Path) -> Path:
    """A destination that an interrupted run has begun."""
    shutil.copytree(left, partial(tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "victim"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    return path


def _next_shard(folder: Path) -> str:
    """The file that the resumed run begins."""
    newest = sorted(folder.glob("*.safetensors"))[-1].name
    return newest.replace(newest[6:11], f"{int(newest[6:11]) + 1:05d}")


def _link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def _link_to_nothing(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("new"))


def _second_name(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def _pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, victim: Path) -> None:
    path.mkdir()


PLANTS = (_link, _link_to_nothing, _second_name, _pipe, _folder)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize(
    "name", ["next shard", "first shard", "config.json", "quantkit.json", JOURNAL]
)
def test_what_is_no_plain_file_is_refused(
    name: str, plant: Callable[[Path, Path], None], demo_model: Path, dst: Path, victim: Path
) -> None:
    folder = partial(dst)
    first = sorted(path.name for path in folder.glob("*.safetensors"))[0]
    planted = folder / {"next shard": _next_shard(folder), "first shard": first}.get(name, name)
    planted.unlink(missing_ok=True)
    plant(planted, victim)
    with raises(ResumeError, path=planted):
        quantkit.convert(demo_model, dst, resume=True)
    assert contents(victim.parent) == {"victim": SECRET}
    assert planted.is_symlink() or planted.exists()
    assert not dst.exists()


@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_while_a_run_goes_on_is_refused(
    plant: Callable[[Path, Path], None], demo_model: Path, dst: Path, victim: Path
) -> None:
    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if done == total:
            plant(partial(dst) / "tokenizer.model", victim)

    with raises(ResumeError, path=partial(dst) / "tokenizer.model"):
        quantkit.convert(demo_model, dst, resume=True, source_check=False, progress=progress)
    assert contents(victim.parent) == {"victim": SECRET}
    assert (partial(dst) / JOURNAL).is_file()  # the finished part is not lost


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("plant", PLANTS[:-1])
def test_a_partial_folder_that_is_none_is_refused(
    plant: Callable[[Path, Path], None],
    resume: bool,
    demo_model: Path,
    tmp_path: Path,
    victim: Path,
) -> None:
    target = victim.parent if plant is _link else victim
    plant(partial(tmp_path / "new"), target)
    with raises(ResumeError, path=partial(tmp_path / "new")):
        quantkit.convert(demo_model, tmp_path / "new", resume=resume)
    assert contents(victim.parent) == {"victim": SECRET}


def test_a_link_to_an_interrupted_run_is_not_followed(
    demo_model: Path, dst: Path, tmp_path: Path
) -> None:
    before = contents(partial(dst))
    partial(tmp_path / "new").symlink_to(partial(dst))
    with raises(ResumeError, path=partial(tmp_path / "new")):
        quantkit.convert(demo_model, tmp_path / "new", resume=True)
    assert contents(partial(dst)) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_belongs_to_another_user_is_refused(what: str, demo_model: Path, dst: Path) -> None:
    planted = partial(dst) if what == "folder" else partial(dst) / JOURNAL
    os.chown(planted, 12345, -1)
    with raises(ResumeError, path=planted):
        quantkit.convert(demo_model, dst, resume=True)


@pytest.mark.parametrize(
    "line", [b"garbage", b"{}", b"[]", b"5", b"null", b'"', b"\xff\xfe", b"[" * 20_000, b""]
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_journal_that_is_none(
    place: str, line: bytes, demo_model: Path, dst: Path, capfd: Capture
) -> None:
    journal = partial(dst) / JOURNAL
    lines = journal.read_bytes()
    journal.write_bytes(line + b"\n" + lines if place == "first" else lines + line + b"\n")
    code, _, err = run(capfd, "convert", demo_model, dst, "--resume")
    assert (code, err.count("\n")) == (6, 1)
    assert str(partial(dst) / JOURNAL) in err
    assert not dst.exists()


CHANGES: dict[str, Change] = {
    "no tensors": lambda entry: entry.pop("tensors") and None,
    "tensors in words": lambda entry: entry.update(tensors="3"),
    "a truth for tensors": lambda entry: entry.update(tensors=True),
    "more tensors than there are": lambda entry: entry.update(tensors=10**9),
    "fewer than none": lambda entry: entry.update(tensors=-1),
    "a float": lambda entry: entry.update(tensors=1.0),
    "files in a list": lambda entry: entry.update(files=list(entry["files"])),
    "a size below zero": lambda entry: entry["files"].update({min(entry["files"]): -1}),
    "a size beyond the file": lambda entry: entry["files"].update({min(entry["files"]): 10**12}),
    "a huge size": lambda entry: entry["files"].update({min(entry["files"]): 10**400}),
    "a size in words": lambda entry: entry["files"].update({min(entry["files"]): "1"}),
    "no sha256": lambda entry: entry.pop("sha256") and None,
    "one sha256 is missing": lambda entry: entry["sha256"].popitem() and None,
    "a sha256 that is none": lambda entry: entry["sha256"].update({min(entry["files"]): 5}),
    "records in a list": lambda entry: entry.update(records=[]),
    "records of other tensors": lambda entry: entry.update(records={"x": {}}),
    "a record that is none": lambda entry: entry.update(records={"model.norm.weight": 5}),
    "other keys": lambda entry: entry.update(more=1),
    "a second fingerprint": lambda entry: {"fingerprint": {}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_journal_of_another_form(change: str, demo_model: Path, dst: Path) -> None:
    rewrite_last(partial(dst), CHANGES[change])
    before = contents(partial(dst))
    with pytest.raises(ResumeError) as caught:
        quantkit.convert(demo_model, dst, resume=True)
    assert caught.value.path is not None
    assert Path(caught.value.path).parent == partial(dst)
    assert contents(partial(dst)) == before


@pytest.mark.parametrize("value", [None, 5, [], "x"])
def test_a_fingerprint_that_is_none(value: Any, demo_model: Path, dst: Path) -> None:
    journal = partial(dst) / JOURNAL
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    rewrite_last(partial(dst), lambda entry: entry.update(fingerprint=value))
    with raises(ResumeError, path=partial(dst) / JOURNAL):
        quantkit.convert(demo_model, dst, resume=True)


@pytest.mark.parametrize(
    "state", [None, 5, [], {}, [5], [{"records": 5, "position": 1}], [{"position": "x"}]]
)
def test_a_journal_with_a_state_of_another_form(
    state: Any, demo_model: Path, tmp_path: Path
) -> None:
    interrupted(lambda *a, **b: quantkit.convert(*a, to="meta", **b), demo_model, tmp_path / "out")
    rewrite_last(partial(tmp_path / "out"), lambda entry: entry.update(state=state))
    with raises(ResumeError, path=partial(tmp_path / "out") / JOURNAL):
        quantkit.convert(demo_model, tmp_path / "out", to="meta", resume=True)


@pytest.mark.parametrize(
    "name", ["../elsewhere/victim", "absolute", "quantkit.json", JOURNAL, "", "..", "a\0b"]
)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_journal_that_names_other_files(
    sealed: bool, name: str, demo_model: Path, dst: Path, victim: Path
) -> None:
    """Each would be cut to the size that the journal gives."""
    entry_name = str(victim) if name == "absolute" else name

    def change(entry: dict[str, Any]) -> None:
        entry["files"][entry_name] = 0
        entry["sha256"][entry_name] = "0" * 64

    if sealed:
        rewrite_last(partial(dst), change)
    else:
        journal = partial(dst) / JOURNAL
        entry = f'"{entry_name}": 0, '.encode()
        journal.write_bytes(journal.read_bytes().replace(b'"files": {', b'"files": {' + entry))
    with raises(ResumeError, path=partial(dst) / JOURNAL):
        quantkit.convert(demo_model, dst, resume=True)
    assert contents(victim.parent) == {"victim": SECRET}


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_a_flipped_bit_in_the_journal_is_noticed(to: str, demo_model: Path, tmp_path: Path) -> None:
    """Some would go into the files: the checksums of a `.pth` are there, and records of the
    manifest.
    """
    dst = tmp_path / "out"
    folder = interrupted(lambda *a, **b: quantkit.convert(*a, to=to, **b), demo_model, dst)
    whole = (folder / JOURNAL).read_bytes()
    for place in range(len(whole) // 2, len(whole) - 1, len(whole) // 16):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        (folder / JOURNAL).write_bytes(flipped)
        with raises(ResumeError, path=folder / JOURNAL):
            quantkit.convert(demo_model, dst, to=to, resume=True)
    (folder / JOURNAL).write_bytes(whole)
    quantkit.convert(demo_model, dst, to=to, resume=True)


def test_only_what_is_listed_is_shipped(demo_model: Path, tmp_path: Path) -> None:
    whole, dst = tmp_path / "whole", tmp_path / "out"
    quantkit.convert(demo_model, whole)

    def progress(phase: str, done: int, total: int, unit: str) -> None:
        (partial(dst) / "notes.txt").write_text("mine")

    with raises(DestinationError, path=partial(dst) / "notes.txt", options=["resume"]):
        quantkit.convert(demo_model, dst, source_check=False, progress=progress)
    assert not dst.exists()
    (partial(dst) / "notes.txt").rename(tmp_path / "notes.txt")
    quantkit.convert(demo_model, dst, resume=True)
    assert contents(dst) == contents(whole)


def test_a_file_that_is_gone_is_noticed(demo_model: Path, dst: Path) -> None:
    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if phase == "convert":
            for path in partial(dst).glob("model-00001-*"):
                path.unlink()

    with raises(DestinationError, "model-00001"):
        quantkit.convert(demo_model, dst, resume=True, source_check=False, progress=progress)
    assert not dst.exists()


def test_another_folder_of_the_same_name_is_not_taken_for_the_output(
    demo_model: Path, dst: Path
) -> None:
    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if done == total:
            partial(dst).rename(dst.with_name("moved"))
            partial(dst).mkdir()

    with raises(DestinationError, path=partial(dst)):
        quantkit.convert(demo_model, dst, resume=True, source_check=False, progress=progress)
    assert not dst.exists()
    assert list(partial(dst).iterdir()) == []


def test_scratch_of_earlier_runs_is_removed(demo_model: Path, dst: Path, victim: Path) -> None:
    whole = dst.with_name("whole")
    quantkit.convert(demo_model, whole)
    for rank in range(3):
        (partial(dst) / f".activations-{rank}").mkdir()
        (partial(dst) / f".activations-{rank}" / "0").write_bytes(b"states")
    (partial(dst) / ".activations-3").symlink_to(victim.parent)
    quantkit.convert(demo_model, dst, resume=True)
    assert contents(dst) == contents(whole)
    assert contents(victim.parent) == {"victim": SECRET}


def test_a_failed_run_removes_no_more_than_its_own_folder(
    demo_model: Path, tmp_path: Path, victim: Path
) -> None:
    source, dst = tmp_path / "source", tmp_path / "out"
    shutil.copytree(demo_model, source)

    def progress(phase: str, done: int, total: int, unit: str) -> None:
        if done == total:
            partial(dst).rename(tmp_path / "moved")
            partial(dst).symlink_to(victim.parent)
            os.utime(source / "consolidated.00.pth", (1, 1))

    with pytest.raises(quantkit.errors.CheckpointError):
        quantkit.convert(source, dst, source_check=False, progress=progress)
    assert contents(victim.parent) == {"victim": SECRET}


@pytest.mark.parametrize("obstacle", ["folder", "full folder", "file", "link"])
def test_an_output_that_found_its_name_taken_is_finished_later(
    obstacle: str, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    whole, dst = tmp_path / "whole", tmp_path / "out"
    quantkit.convert(demo_model, whole)

    def progress(phase: str, done: int, total: int, unit: str) -> None:
        # The comparison with the source is the last phase.
        if done < total or phase != "exact":
            return
        if "folder" in obstacle:
            dst.mkdir()
        if obstacle == "full folder":
            (dst / "mine").touch()
        if obstacle == "file":
            dst.touch()
        if obstacle == "link":
            dst.symlink_to(tmp_path / "nowhere")

    with raises(DestinationError, path=dst, options=["resume"]):
        quantkit.convert(demo_model, dst, source_check=False, progress=progress)
    assert (partial(dst) / JOURNAL).is_file()
    code, _, err = run(capfd, "convert", demo_model, dst, "--resume")
    assert code == 5
    assert str(dst) in err
    dst.rename(tmp_path / "obstacle")
    code, _, err = run(capfd, "convert", demo_model, dst, "--resume")
    assert code == 0, err
    assert contents(dst) == contents(whole)
    assert not partial(dst).exists()


@pytest.mark.slow
def test_a_run_killed_after_the_rename_leaves_a_whole_model(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    whole, dst = tmp_path / "whole", tmp_path / "out"
    quantkit.convert(demo_model, whole)
    killed = (
        "import os, signal, sys, quantkit\n"
        "from quantkit.jobs.output import target\n"
        "target.SHARD_BYTES = 300_000\n"
        "unlink = os.unlink\n"
        "def stop(path, **options):\n"
        "    if 'journal' in str(path):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    unlink(path, **options)\n"
        "os.unlink = stop\n"
        "quantkit.convert(sys.argv[1], sys.argv[2])\n"
    )
    assert forked.python(killed, demo_model, dst).returncode == -signal.SIGKILL
    found = contents(dst)
    del found[JOURNAL]
    assert found == contents(whole)
    assert run(capfd, "verify", dst)[0] == 0
    assert run(capfd, "inspect", dst)[0] == 0
    again = tmp_path / "again"
    quantkit.convert(dst, again)  # as a source, too
    assert not (again / JOURNAL).exists()


def test_the_output_has_the_modes_that_the_user_requested(demo_model: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        quantkit.convert(demo_model, tmp_path / "deep" / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "deep" / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "deep" / "out" / "config.json").stat().st_mode & 0o777 == 0o640
