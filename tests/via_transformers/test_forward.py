"""States and logits of any checkpoint, by our decoder or by transformers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import torch
import transformers
from error_parts import raises

from quantkit.errors import UnsupportedError
from quantkit.formats.container import StoredCheckpoint
from quantkit.formats.detect import open_checkpoint
from quantkit.model.layerwise import Batch
from quantkit.via_transformers.forward import (
    final_hidden,
    final_logits,
    passage_of,
    run_by_transformers,
)

Tiny = Callable[[str], Path]


def _run(folder: Path) -> StoredCheckpoint:
    return run_by_transformers(open_checkpoint(folder, tensors_only=True))


@pytest.mark.parametrize("by", ["own", "transformers"])
def test_whatever_runs_a_model_its_logits_are_the_same(by: str, tiny_model: Tiny) -> None:
    folder, tokens = tiny_model("llama"), oracle.random_tokens(30, 2, 2000)
    source = open_checkpoint(folder) if by == "own" else _run(folder)
    one, other = final_hidden(source, [Batch.from_start(some) for some in torch.split(tokens, 1)])
    expected = oracle.logits(oracle.load(folder), tokens)
    found = final_logits(source, [one[0, :7], other[0], one[0, 29:]])
    torch.testing.assert_close(
        found, [expected[0, :7], expected[1], expected[0, 29:]], atol=1e-4, rtol=1e-4
    )


def test_a_model_that_rescales_its_weights_has_the_same_logits(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    folder = oracle.copy(tiny_model("rwkv"), tmp_path / "rwkv")
    # transformers halves weights of the second block, and hidden states after the first.
    oracle.edit_json(folder / "config.json", rescale_every=1)
    source, tokens = _run(folder), oracle.random_tokens(30, 1, 2000)
    (hidden,) = final_hidden(source, [Batch.from_start(tokens)])
    expected = oracle.logits(oracle.load(folder), tokens)
    torch.testing.assert_close(
        final_logits(source, [hidden[0]]), [expected[0]], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "context"), [("llama", 320), ("bloom", 2048)]
)  # one that its config has, and none
def test_what_runs_a_model_is_recorded_and_made_once(
    kind: str, context: int, tiny_model: Tiny
) -> None:
    source = _run(tiny_model(kind))
    assert source.config.run_by == f"transformers {transformers.__version__}"
    assert source.config.measurable
    assert not source.config.runnable
    assert source.config.max_context == context
    assert passage_of(source) is passage_of(source) is not passage_of(_run(tiny_model(kind)))


def test_a_model_that_cannot_be_built_stays_unmeasurable(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = oracle.copy(tiny_model("llama"), tmp_path / "copy")
    oracle.edit_json(folder / "config.json", model_type="no_one")
    source = open_checkpoint(folder, tensors_only=True)
    with raises(UnsupportedError, "'no_one'"):
        run_by_transformers(source)
    assert not source.config.measurable


@pytest.mark.slow
def test_a_model_goes_with_its_checkpoint(tiny_model: Tiny) -> None:
    checkpoint = open_checkpoint(tiny_model("llama"), tensors_only=True)
    passage = weakref.ref(passage_of(checkpoint))
    assert passage() is passage_of(checkpoint)
    del checkpoint
    gc.collect()
    assert passage() is None
