"""A source that makes no sense is not copied: its copy would pass every comparison with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.data.files import excerpt
from quantkit.errors import CheckpointError, NonFiniteError
from quantkit.formats.detect import open_checkpoint
from quantkit.quality import source_check
from quantkit.quality.source_check import SourceCheck, check_source
from quantkit.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a Hugging Face folder."""
    from quantkit.data.files import DEMO_MODEL

    folder = tmp_path_factory.mktemp("models") / "sound"
    quantkit.convert(DEMO_MODEL, folder)
    return folder


def _damaged(sound: Path, target: Path, damage: Callable[[dict[str, Tensor]], object]) -> Path:
    oracle.copy(sound, target)
    tensors = load_file(target / "model.safetensors")
    damage(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _shuffled(tensors: dict[str, Tensor]) -> None:
    """Every row elsewhere, as if rows were read from wrong offsets."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = (
                10 * tensor.float()[torch.randperm(len(tensor), generator=generator)]
            ).to(tensor.dtype)


def _zeroed(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"].zero_()


def _read_check(folder: Path) -> Any:
    return json.loads((folder / "quantkit.json").read_text())["source_check"]


def _headless(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"].zero_()


def _one_row(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"][:] = tensors["model.embed_tokens.weight"][5].clone()


@pytest.mark.parametrize("job", ["convert", "quantize"])
@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (_shuffled, "perplexity"),
        # The two checks have the same type and exit code.
        (_zeroed, "the same prediction"),
        (_headless, "the same prediction"),
        (_one_row, "the same prediction"),
    ],
    ids=["shuffled", "zeroed", "headless", "one row"],
)
def test_a_broken_source_is_reported_and_nothing_is_written(
    damage: Callable[[dict[str, Tensor]], object],
    found: str,
    job: str,
    sound: Path,
    tmp_path: Path,
    capfd: Capture,
) -> None:
    source = _damaged(sound, tmp_path / "source", damage)
    scheme = ["--scheme", "int8"] if job == "quantize" else []
    code, _, err = run(capfd, job, source, tmp_path / "out", *scheme)
    assert code == 3
    assert str(source) in err
    assert found in err
    assert "--no-source-check" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("job", ["convert", "quantize"])
def test_the_manifest_reports_what_was_measured_or_that_it_was_not(
    job: str, sound: Path, tmp_path: Path, capfd: Capture
) -> None:
    scheme = ["--scheme", "int8"] if job == "quantize" else []
    for name, options in (("checked", []), ("unchecked", ["--no-source-check"])):
        assert run(capfd, job, sound, tmp_path / name, *scheme, *options)[0] == 0
    reported = _read_check(tmp_path / "checked")
    measured = check_source(open_checkpoint(sound))
    assert isinstance(measured, SourceCheck)
    assert reported == asdict(measured)
    assert isinstance(_read_check(tmp_path / "unchecked"), str)


def test_the_figures_are_those_of_transformers(sound: Path) -> None:
    measured = check_source(open_checkpoint(sound))
    assert isinstance(measured, SourceCheck)
    tokenizer = load_tokenizer(sound)
    ids = torch.tensor([tokenizer.encode(excerpt())[:256]])
    logits = oracle.logits(oracle.load(sound), ids)[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    assert measured.tokens == 255
    assert measured.perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    written = len(tokenizer.decode(ids[0].tolist()).encode())
    assert measured.bits_per_byte == pytest.approx(255 * loss / math.log(2) / written, rel=1e-3)


def test_a_source_that_predicts_poorly_gets_a_note(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = quantkit.convert(sound, tmp_path / "sound").notes
    quantized = quantkit.quantize(sound, tmp_path / "int8", "int8").notes
    monkeypatch.setattr(source_check, "NOTED_BITS_PER_BYTE", 1.0)
    poor = quantkit.convert(sound, tmp_path / "poor").notes
    assert len(set(poor) - set(converted)) == 1
    poor_quantized = quantkit.quantize(sound, tmp_path / "poor-int8", "int8").notes
    assert len(set(poor_quantized) - set(quantized)) == 1


def test_a_source_without_tokenizer_cannot_be_tried(tmp_path: Path) -> None:
    source = oracle.save(oracle.make("llama"), tmp_path / "m")
    quantkit.convert(source, tmp_path / "out")
    assert "tokenizer" in _read_check(tmp_path / "out")
    assert quantkit.plan.convert(source, tmp_path / "other").source_check_tokens == 0


def test_a_quantized_source_is_tried_too(sound: Path, tmp_path: Path) -> None:
    quantkit.quantize(sound, tmp_path / "q", "int8")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("weight_packed"):
            tensors[name] = tensor.flip(0)
    save_file(tensors, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    with raises(CheckpointError, path=tmp_path / "q", options=["source_check"]):
        quantkit.convert(tmp_path / "q", tmp_path / "out")


def test_what_is_not_finite_is_named(sound: Path, tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = math.inf

    source = _damaged(sound, tmp_path / "source", damage)
    with raises(NonFiniteError, "model.layers.1.mlp.down_proj", path=source):
        quantkit.convert(source, tmp_path / "out")
    quantkit.convert(source, tmp_path / "out", allow_nonfinite=True)
    assert "NaN" in _read_check(tmp_path / "out")


def test_plan_reports_the_check(sound: Path, tmp_path: Path) -> None:
    requested: dict[str, Any] = {"source_check": False}
    plan, out = quantkit.plan, tmp_path / "o"
    for forecast, without in (
        (plan.convert(sound, out), plan.convert(sound, out, **requested)),
        (plan.quantize(sound, out, "int8"), plan.quantize(sound, out, "int8", **requested)),
    ):
        assert forecast.source_check_tokens == 256
        assert any("256 tokens" in line for line in forecast.lines())
        assert without.source_check_tokens == 0
        assert not any("256 tokens" in line for line in without.lines())
