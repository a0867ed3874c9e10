"""Hidden states of a source that the checks of a job share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.formats.checkpoint import Checkpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch, layerwise_hidden
from quantkit.quality import kept_states
from quantkit.quality.bounds import build_gate_windows, count_gate_tokens
from quantkit.quality.kept_states import KeptStates, count_kept_bytes
from quantkit.quality.source_check import check_source
from quantkit.via_transformers import forward
from quantkit.via_transformers.forward import final_hidden


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each pass that is made for kept states."""
    counts: list[int] = []

    def counted(checkpoint: Checkpoint, batches: Sequence[Batch], **options: Any) -> list[Tensor]:
        counts.append(sum(batch.tokens.numel() for batch in batches))
        return final_hidden(checkpoint, batches, **options)

    monkeypatch.setattr(kept_states, "final_hidden", counted)
    return counts


def test_all_windows_pass_the_source_once_with_the_same_bits(
    demo_model: Path, passes: list[int]
) -> None:
    source = open_checkpoint(demo_model)
    batches = [Batch.from_start(windows) for _, windows in build_gate_windows(source).values()]
    hidden = KeptStates(source)
    (first,) = hidden(source, [Batch.from_start(batches[0].tokens[:1])])
    kept = hidden(source, batches)
    assert passes == [count_gate_tokens(source)]
    for states, expected in zip(kept, final_hidden(source, batches), strict=True):
        assert torch.equal(states, expected)
    assert torch.equal(first, kept[0][:1])
    assert sum(states.nbytes for states in kept) == count_kept_bytes(source)


def test_other_tokens_and_models_are_computed(demo_model: Path, passes: list[int]) -> None:
    source = open_checkpoint(demo_model)
    hidden = KeptStates(source)
    _, windows = next(iter(build_gate_windows(source).values()))
    flipped = Batch.from_start(windows.flip(1))
    (states,) = hidden(source, [flipped])
    assert torch.equal(states, final_hidden(source, [flipped])[0])
    shifted = Batch(windows, torch.arange(1, windows.shape[1] + 1))
    hidden(source, [shifted])
    hidden(open_checkpoint(demo_model), [Batch.from_start(windows)])
    assert passes == [windows.numel()] * 3


def test_the_check_of_the_source_finds_the_same_with_kept_states(demo_model: Path) -> None:
    source = open_checkpoint(demo_model)
    kept = check_source(source, source_hidden=KeptStates(source))
    alone = check_source(source)
    assert not isinstance(kept, str)
    assert not isinstance(alone, str)
    assert (kept.text, kept.tokens) == (alone.text, alone.tokens)
    assert kept.perplexity == pytest.approx(alone.perplexity, rel=1e-4)


@pytest.mark.parametrize("source_check", [True, False])
def test_a_job_runs_the_source_on_the_windows_once(
    source_check: bool, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counted(checkpoint: Checkpoint, batches: Sequence[Batch], **options: Any) -> list[Tensor]:
        # The result of rounding is its own baseline, so that only the source has this path.
        if checkpoint.path == demo_model:
            counts.append(sum(batch.tokens.numel() for batch in batches))
        return layerwise_hidden(checkpoint, batches, **options)

    monkeypatch.setattr(forward, "layerwise_hidden", counted)
    quantkit.quantize(demo_model, tmp_path / "out", "int8", source_check=source_check)
    assert counts == [count_gate_tokens(open_checkpoint(demo_model))]
