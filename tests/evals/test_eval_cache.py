"""The reference's states on disk: used when they are the right ones, and only then."""

from __future__ import annotations

import os
from pathlib import Path

import oracle
import pytest
import torch

from quantkit.errors import DestinationError
from quantkit.evals import models
from quantkit.evals.models import StateCache
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch, layerwise_hidden


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return oracle.save(oracle.make("llama"), tmp_path / "source")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one each time a model is run."""
    counted: list[int] = []

    def run(*arguments: object, **options: object) -> list[torch.Tensor]:
        counted.append(1)
        return layerwise_hidden(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(models, "final_hidden", run)
    return counted


BATCHES = [
    Batch.from_start(oracle.random_tokens(20, batch=2)),
    Batch.from_start(oracle.random_tokens(7)),
]


def test_states_are_computed_once_and_are_the_same(
    source: Path, tmp_path: Path, runs: list[int]
) -> None:
    expected = layerwise_hidden(open_checkpoint(source), BATCHES)
    for _ in range(3):
        found = StateCache(tmp_path / "cache")(open_checkpoint(source), BATCHES)
        assert [state.dtype for state in found] == [torch.float32] * 2
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(runs) == 1
    files = list((tmp_path / "cache").iterdir())
    assert [file.suffix for file in files] == [".safetensors"]
    assert files[0].stat().st_size < sum(state.nbytes for state in expected) + 1000


def test_another_text_or_model_is_never_given_for_this_one(
    source: Path, tmp_path: Path, runs: list[int]
) -> None:
    kept = StateCache(tmp_path / "cache")
    kept(open_checkpoint(source), BATCHES)
    moved = [Batch(batch.tokens, batch.positions + 1) for batch in BATCHES]
    kept(open_checkpoint(source), moved)
    kept(open_checkpoint(source), BATCHES[:1])
    assert len(runs) == 3
    oracle.copy(source, tmp_path / "copy")
    kept(open_checkpoint(tmp_path / "copy"), BATCHES)
    assert len(runs) == 4
    os.utime(source / "model.safetensors", ns=(0, 1))  # as a weight file written anew would have it
    kept(open_checkpoint(source), BATCHES)
    assert len(runs) == 5


def test_a_damaged_or_renamed_file_is_not_used(
    source: Path, tmp_path: Path, runs: list[int]
) -> None:
    kept = StateCache(tmp_path / "cache")
    expected = kept(open_checkpoint(source), BATCHES)[0].clone()
    (file,) = (tmp_path / "cache").iterdir()
    os.truncate(file, file.stat().st_size - 4)
    assert torch.equal(kept(open_checkpoint(source), BATCHES)[0], expected)
    assert len(runs) == 2
    os.utime(source / "model.safetensors", ns=(0, 1))
    kept(open_checkpoint(source), BATCHES)
    (other,) = set((tmp_path / "cache").iterdir()) - {file}
    file.replace(other)
    kept(open_checkpoint(source), BATCHES)
    assert len(runs) == 4


def test_a_write_that_fails_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models.os, "fsync", full)
    with pytest.raises(DestinationError, match="disk is full"):
        StateCache(tmp_path / "cache")(open_checkpoint(source), BATCHES)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError, match="cannot be written"):
        StateCache(tmp_path / "file" / "cache")
