"""Progress through the output head, which takes longer than the blocks of a small model with a
large vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.architectures.topology import count_head_layers
from quantkit.base.progress import Progress, Stretches
from quantkit.bit_allocation.losses import measure_gradient_squares
from quantkit.calibration.head_gradients import HEAD_TOKENS
from quantkit.calibration.output_gradients import GradientPass
from quantkit.distributed.group import SINGLE
from quantkit.formats.detect import open_checkpoint
from quantkit.passes.decoder_parts import DecoderParts
from quantkit.passes.passage import Passage
from quantkit.quality.measures import Windows, collect_tallies, log_loss

Reports = list[tuple[int, int]]


def _collect(reports: Reports) -> Progress:
    """Return a callback that keeps what is done, and the total."""

    def report(phase: str, done: int, total: int, unit: str, /) -> None:
        reports.append((done, total))

    return report


def _windows(vocab_size: int) -> Windows:
    generator = torch.Generator().manual_seed(0)
    return Windows.of(torch.randint(vocab_size, (64, 64), generator=generator))


def _require_rising(reports: Reports) -> None:
    """Check that reports have one total, never go back, and end at the total."""
    (total,) = {total for _, total in reports}
    done = [done for done, _ in reports]
    assert done == sorted(done)
    assert done[-1] == total


def test_stretches_follow_each_other() -> None:
    reports: Reports = []
    stretches = Stretches(_collect(reports), 10)
    first, second = stretches.next(4), stretches.next(6)
    first("blocks", 1, 2, "layers")
    second("head", 0, 5, "rows")
    second("head", 5, 5, "rows")
    assert reports == [(2, 10), (4, 10), (10, 10)]


@pytest.mark.parametrize("job", ["compare", "loss"])
def test_the_head_is_counted_and_reported(
    job: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantkit.quality.measures.LOGITS_BYTES", 1
    )  # two pieces of 64 rows at a time
    source = open_checkpoint(demo_model)
    monkeypatch.setattr("quantkit.quality.measures.count_head_layers", lambda config: 50)
    reports: Reports = []
    if job == "compare":
        collect_tallies(
            source, [source], [_windows(source.config.vocab_size)], progress=_collect(reports)
        )
    else:
        log_loss(source, [_windows(source.config.vocab_size)], progress=_collect(reports))
    _require_rising(reports)
    models = 2 if job == "compare" else 1
    layers = models * source.config.num_layers
    assert sum(done > layers for done, _ in reports) > 30  # reports while the head computes


def test_the_gradients_of_the_head_are_reported(demo_model: Path) -> None:
    source = open_checkpoint(demo_model)
    samples = _windows(source.config.vocab_size).tokens[:8, :32]
    reports: Reports = []
    parts = DecoderParts(source, 32, torch.device("cpu"))
    gradient_pass = GradientPass(Passage(parts, source.path), samples, 8, 100, SINGLE)
    squares = measure_gradient_squares(gradient_pass, parts.list_groups(), set(), _collect(reports))
    assert squares == {}
    _require_rising(reports)
    head = [done for done, total in reports if done > source.config.num_layers]
    assert len(head) >= 8 * -(-32 // HEAD_TOKENS)


def test_a_large_vocabulary_counts_as_many_layers(demo_model: Path) -> None:
    config = open_checkpoint(demo_model).config
    assert count_head_layers(config) >= 1
    assert count_head_layers(
        replace(config, vocab_size=100 * config.vocab_size)
    ) > 20 * count_head_layers(config)
