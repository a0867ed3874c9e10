"""Outputs that are files with a manifest: all are renamed, or none, whenever a run is stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from error_parts import raises
from torch import Tensor

from quantkit.base.progress import silent
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import (
    CheckpointError,
    DestinationError,
    InterruptedRunError,
    RequestError,
    ResumeError,
)
from quantkit.files.tensor_file import StoredTensor
from quantkit.formats import manifest
from quantkit.formats.container import Chunk, tensor_bytes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.output import placed_files
from quantkit.formats.output.destination import manifest_path, place_output
from quantkit.formats.output.placed_files import PlacedFiles
from quantkit.formats.output.staging import require_finished, require_name
from quantkit.jobs.output.writer import Work, open_writer
from quantkit.quality.manifest_check import verify_model
from quantkit.tensors.dtypes import DType
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.spec import TensorSpec

COUNT = 4
SPLIT = [f"x-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
MANIFEST = "x.gguf.quantkit.json"


class Bytes:
    """A tensor after the other, in as many files as there are names."""

    rearranges = False
    max_buffered_bytes = 0
    holds = False

    def __init__(self, names: Sequence[str]) -> None:
        self.planned = [
            TensorSpec(f"tensor {index}", (8,), DType.FLOAT32) for index in range(COUNT)
        ]
        self._names = names

    def total_bytes(self) -> int:
        return 32 * COUNT

    def canonical_name(self, index: int) -> str:
        return self.planned[index].name

    def files(self) -> Sequence[str]:
        return self._names

    def encode(self, index: int, value: Tensor | QuantTensor) -> Iterator[Chunk]:
        assert isinstance(value, Tensor)
        yield (
            self._names[index * len(self._names) // COUNT],
            tensor_bytes(value, StoredTensor("", DType.FLOAT32, (8,))),
        )

    def finish(self) -> Iterator[Chunk]:
        return iter(())

    def decode(self, index: int, folder: Path) -> Tensor:
        raise NotImplementedError

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        pass

    def extra_files(self) -> dict[str, bytes]:
        return {}


def make(
    dst: Path,
    names: Sequence[str],
    *,
    resume: bool = False,
    before: Callable[[], object] = lambda: None,
) -> None:
    """
    Args:
        before: called before the files get their names.
    """
    work = Work(
        job="convert",
        source=open_checkpoint(DEMO_MODEL),
        encoder=Bytes(names),
        side_files={},
        options={},
    )
    with open_writer(work, dst, resume=resume, source_check=False, progress=silent) as writer:
        for index in range(writer.done, COUNT):
            writer.put(f"tensor {index}", torch.full((8,), float(index)))
        writer.finish()
        before()
        writer.commit({})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(params=[["x.gguf"], SPLIT], ids=["one", "split"])
def names(request: pytest.FixtureRequest) -> list[str]:
    found: list[str] = request.param
    return found


def test_files_lie_next_to_their_manifest(names: list[str], tmp_path: Path) -> None:
    make(tmp_path / "x.gguf", names)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, MANIFEST])
    for path in (tmp_path / "x.gguf", *(tmp_path / name for name in names)):
        assert manifest_path(path) == tmp_path / MANIFEST
        assert set(manifest.read(path)["files"]) == set(names)
        report = verify_model(path)
        assert (report.is_same, report.files) == (True, len(names))


@pytest.mark.parametrize("there", ["the destination", "the manifest", "the last part"])
def test_nothing_is_overwritten(there: str, names: list[str], tmp_path: Path) -> None:
    path = (
        tmp_path
        / {"the destination": "x.gguf", "the manifest": MANIFEST, "the last part": names[-1]}[there]
    )
    path.write_text("mine")
    with raises(DestinationError, path=path):
        make(tmp_path / "x.gguf", names)
    assert contents(tmp_path) == {path.name: b"mine"}


@pytest.mark.parametrize("which", ["the manifest", "the first part"])
def test_what_appears_meanwhile_is_not_overwritten(
    which: str, names: list[str], tmp_path: Path
) -> None:
    path = tmp_path / (MANIFEST if which == "the manifest" else names[0])
    with raises(DestinationError, path=path):
        make(tmp_path / "x.gguf", names, before=lambda: path.write_text("mine"))
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [path.name]
    with raises(DestinationError, path=path):
        make(tmp_path / "x.gguf", names, resume=True)
    assert path.read_text() == "mine"

    path.unlink()
    make(tmp_path / "x.gguf", names, resume=True)
    assert verify_model(tmp_path / names[0]).is_same
    assert not (tmp_path / "x.gguf.partial").exists()


def stop(step: int, after: bool, killed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt after `step` files are renamed, before or after the next rename.

    Args:
        killed: whether the process has no time to put anything in order.
    """
    calls: list[Path] = []

    def place(old: Path, new: Path) -> None:
        calls.append(new)
        if len(calls) != step + 1:
            place_output(old, new)
            return
        if after:
            place_output(old, new)
        if killed:
            monkeypatch.setattr(PlacedFiles, "take_back", lambda *args: None)
        raise KeyboardInterrupt

    monkeypatch.setattr(placed_files, "place_output", place)


@pytest.mark.parametrize("killed", [False, True], ids=["interrupted", "killed"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("names", "step"), [(["x.gguf"], 0), (["x.gguf"], 1), (SPLIT, 0), (SPLIT, 2), (SPLIT, 3)]
)
def test_an_interruption_leaves_all_or_nothing(
    names: list[str],
    step: int,
    after: bool,
    killed: bool,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = tmp_path_factory.mktemp("made")
    make(whole / "x.gguf", names)
    dst, complete = tmp_path / "x.gguf", after and step == len(names)
    with monkeypatch.context() as patched:
        stop(step, after, killed, patched)
        with pytest.raises(KeyboardInterrupt) as caught:
            make(dst, names)
    assert (tmp_path / names[0]).exists() == complete, "what readers open comes last"
    if complete:
        assert contents(tmp_path) == contents(whole)
        assert not hasattr(caught.value, "__notes__")
        return
    assert killed or [path.name for path in tmp_path.iterdir()] == ["x.gguf.partial"]
    with pytest.raises(InterruptedRunError):
        make(dst, names)
    make(dst, names, resume=True)
    assert contents(tmp_path) == contents(whole)


def test_only_what_the_run_placed_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        stop(1, False, True, patched)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "x.gguf", SPLIT)
    placed = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).unlink()
    (tmp_path / MANIFEST).write_bytes(placed)  # somebody's copy
    with raises(DestinationError, path=tmp_path / MANIFEST):
        make(tmp_path / "x.gguf", SPLIT, resume=True)
    assert (tmp_path / MANIFEST).read_bytes() == placed


def test_a_journal_of_another_form(tmp_path: Path) -> None:
    placed = PlacedFiles(tmp_path, ["x.gguf"])
    with pytest.raises(ResumeError):
        placed.take_back(type("Folder", (), {"path": tmp_path}), [{placed_files.ENTRY: 1}])  # type: ignore[arg-type]


def test_a_file_in_a_folder_that_quantkit_made_has_a_manifest_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "quantkit.json").write_text("{}")
    assert manifest_path(tmp_path / "model.gguf") == tmp_path / "quantkit.json"
    make(tmp_path / "model.gguf", ["model.gguf"])
    assert verify_model(tmp_path / "model.gguf").files == 1
    assert (tmp_path / "quantkit.json").read_text() == "{}"


def test_an_unfinished_file_is_no_model(tmp_path: Path) -> None:
    def look() -> None:
        with raises(CheckpointError, str(tmp_path / "x.gguf.partial")):
            require_finished(tmp_path / "x.gguf.partial" / "x.gguf", manifest.NAME)

    make(tmp_path / "x.gguf", ["x.gguf"], before=look)
    require_finished(tmp_path / "x.gguf", manifest.NAME)


@pytest.mark.parametrize("name", [SPLIT[0], "x.GGUF"])
def test_names_that_are_no_destination(name: str, tmp_path: Path) -> None:
    with raises(RequestError, found=name) as caught:
        require_name(tmp_path / name)
    assert "x.gguf" in str(caught.value.hint)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_verify_finds_what_is_not_as_it_was_written(
    damage: str, names: list[str], tmp_path: Path
) -> None:
    make(tmp_path / "x.gguf", names)
    last = tmp_path / names[-1]
    if damage == "changed":
        content = bytearray(last.read_bytes())
        content[5] ^= 1
        last.write_bytes(content)
    else:
        last.unlink()
    with raises(CheckpointError, path=last):
        verify_model(tmp_path / "x.gguf")
    (tmp_path / MANIFEST).rename(tmp_path / "else.json")
    with pytest.raises(
        RequestError
        if not any(map(Path.exists, map(tmp_path.joinpath, names)))
        else CheckpointError
    ):
        verify_model(tmp_path / "x.gguf")
