"""Quantkit's decoder on its way part by part: each expert is a part."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
from saved_experts import save_experts
from solved_streams import CPU

from quantkit.formats.detect import open_checkpoint
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.decoder_parts import DecoderParts
from quantkit.passes.passage import Inputs, Observer, Part, Passage, Routed

LENGTH = 16


def test_batches_stop_only_at_the_inputs_of_experts_and_few_experts_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(save_experts("mixtral", tmp_path / "source"))
    partwise = DecoderParts(source, LENGTH, CPU)
    groups = partwise.list_groups()
    stops: list[object] = []
    entered: list[str] = []

    def list_loaded_experts() -> list[str]:
        return [part for part in partwise.loaded if ".experts." in part]

    class Recorder(Observer):
        def resume(self, index: int) -> None:
            # The expert that the batches are in, and the one that the first of them has reached.
            assert len(list_loaded_experts()) <= 2

        def enter_part(self, part: str) -> None:
            entered.append(part)

    tokens = list(oracle.random_tokens(LENGTH, batch=6, vocabulary=2048).chunk(3))
    passage = Passage(partwise, source.path)
    # All places where batches stop, not only those that are yielded.
    run_rounds = passage._run_rounds

    def watch_rounds(*arguments: object) -> object:
        for place in run_rounds(*arguments):  # type: ignore[arg-type]
            stops.append(place)
            yield place

    monkeypatch.setattr(passage, "_run_rounds", watch_rounds)
    for place in passage.iterate_inputs(groups, tokens, ActivationStore(), Recorder()):
        if isinstance(place, Inputs) and place.sites[0].expert is not None:
            assert list_loaded_experts() == [partwise.part_of(place.sites[0].owner)]
    expert_parts = [part for part in partwise.parts if ".experts." in part]
    assert expert_parts
    assert set(expert_parts) <= set(entered)
    assert len(entered) == len(set(entered))
    assert not any(isinstance(place, Part) and place.name in expert_parts for place in stops)
    assert any(isinstance(place, Routed) for place in stops)
    assert not partwise.loaded
