"""`verify` of models that have no decoder here: transformers runs them, where it is installed
and knows them.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
import tiny_architectures
import torch
import transformers
from error_parts import raises
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.data.files import gate_texts
from quantkit.errors import CheckpointError, QualityError
from quantkit.files.source import SourceFile
from quantkit.quality.measures import text_windows
from quantkit.quality.verify import Verdict, verify
from quantkit.text.tokenizer import load_tokenizer, prompt_start
from quantkit.via_transformers import forward

RUN_BY = f"transformers {importlib.metadata.version('transformers')}"
TEXTS = ["speech", "mixed", "other random tokens"]


def _log_probabilities(folder: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle.load(folder)(input_ids=tokens).logits
    return logits.log_softmax(-1)


def _changed(folder: Path, target: Path, name: str, factor: float) -> Path:
    """A copy of a folder with one tensor multiplied."""
    oracle.copy(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name] *= factor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _without_transformers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forward, "is_installed", lambda: False)


@pytest.mark.slow
def test_logits_are_compared_as_transformers_gives_them(hybrid: Path, hybrid_int4: Path) -> None:
    tokenizer = load_tokenizer(hybrid)
    windows = text_windows(tokenizer.encode(gate_texts()["speech"]), prompt_start(tokenizer), 256)[
        :2
    ]
    p, q = (_log_probabilities(folder, windows) for folder in (hybrid, hybrid_int4))
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    for pair in ((hybrid, hybrid_int4), (hybrid_int4, hybrid)):
        report = verify(*pair)
        assert report.verdict is Verdict.WITHIN_BOUND
        assert list(report.probes) == TEXTS
        assert report.probes["speech"].divergence.kl == pytest.approx(kl, rel=1e-3)
        assert not report.weights_only
        assert report.to_json()["run_by"] == RUN_BY
        assert any(RUN_BY in line for line in report.lines())


@pytest.mark.slow
def test_the_same_floats_are_the_same_model(hybrid: Path, tmp_path: Path) -> None:
    report = verify(hybrid, oracle.copy(hybrid, tmp_path / "copy"))
    assert report.verdict is Verdict.SAME
    assert any(RUN_BY in line for line in report.lines())
    assert verify(
        hybrid, quantkit.convert(hybrid, tmp_path / "converted", tensors_only=True).path
    ).is_same


@pytest.mark.slow
def test_logits_beyond_the_bound_are_a_difference(
    hybrid: Path, hybrid_int4: Path, tmp_path: Path
) -> None:
    name = "lm_head.weight"
    changed = verify(_changed(hybrid, tmp_path / "floats", name, 3.0), hybrid_int4)
    assert changed.verdict is Verdict.DIFFERENT
    assert not changed.probes["speech"].within


@pytest.mark.slow
def test_other_texts_of_the_tokenizer_are_a_difference(hybrid: Path, tmp_path: Path) -> None:
    other = oracle.copy(hybrid, tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    report = verify(hybrid, other)
    assert report.verdict is Verdict.DIFFERENT
    (problem,) = report.problems
    assert problem.endswith("2 against 2, 7")


def test_without_transformers_weights_alone_are_compared(
    hybrid: Path, hybrid_int4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_transformers(monkeypatch)
    report = verify(hybrid, hybrid_int4)
    assert report.verdict is Verdict.WITHIN_BOUND
    assert report.weights_only
    assert report.run_by is None
    assert any("pip install 'quantkit[transformers]'" in line for line in report.lines())
    alone = verify(hybrid_int4)
    assert alone.ok
    assert alone.texts == []
    assert any("pip install 'quantkit[transformers]'" in line for line in alone.lines())


def test_a_model_alone_is_measured_again(hybrid_int4: Path) -> None:
    report = verify(hybrid_int4)
    assert [text.recorded.text for text in report.texts] == TEXTS[:2]
    for text in report.texts:
        assert text.perplexity == pytest.approx(text.recorded.perplexity, rel=1e-3)
    assert any(RUN_BY in line for line in report.lines())


def test_a_perplexity_that_is_not_the_recorded_one_is_an_error(
    hybrid_int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = oracle.copy(hybrid_int4, tmp_path / "copy")
    manifest = json.loads((copy / "quantkit.json").read_text())
    recorded = manifest["quality"]["texts"][0]
    recorded["perplexity"] *= 1.1
    (copy / "quantkit.json").write_text(json.dumps(manifest))
    with raises(QualityError, "'speech'", path=copy, expected=f"{recorded['perplexity']:.4g}"):
        verify(copy)
    recorded["kl"] = 1.0
    (copy / "quantkit.json").write_text(json.dumps(manifest))
    _without_transformers(monkeypatch)  # what was recorded counts all the same
    with raises(QualityError, "'speech'", "KL", path=copy):
        verify(copy)


def test_a_model_that_cannot_be_passed_part_by_part_is_compared_by_its_weights(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    # Its wrapper is not called.
    folder = tiny_model("prophetnet")
    report = verify(folder, oracle.copy(folder, tmp_path / "copy"))
    assert report.weights_only
    assert "base model" in (report.not_run or "")


def test_sizes_have_the_names_that_transformers_gives_them(tmp_path: Path) -> None:
    tiny_architectures.make("xlm", tmp_path / "xlm")  # whose hidden size is `emb_dim`
    assert verify(tmp_path / "xlm", tmp_path / "xlm").run_by == RUN_BY


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("T5ForConditionalGeneration", "encoder"),
        ("BertModel", "output head"),
    ],
)
def test_a_model_that_predicts_no_next_token_is_compared_by_its_weights(
    kind: str, reason: str, tmp_path: Path
) -> None:
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 64,
        "num_layers": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = transformers.AutoConfig.for_model("t5" if kind.startswith("T5") else "bert", **sizes)
    folder = oracle.save(getattr(transformers, kind)(config), tmp_path / "model")
    report = verify(folder, oracle.copy(folder, tmp_path / "copy"))
    assert report.verdict is Verdict.SAME
    assert report.weights_only
    assert reason in (report.not_run or "")


def test_what_transformers_cannot_load_is_compared_by_its_weights(
    hybrid: Path, tmp_path: Path
) -> None:
    partial = oracle.copy(hybrid, tmp_path / "partial")
    tensors = load_file(partial / "model.safetensors")
    del tensors["model.layers.0.input_layernorm.weight"]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    copy = quantkit.convert(partial, tmp_path / "copy", tensors_only=True).path
    report = verify(partial, copy)
    assert report.verdict is Verdict.SAME
    assert "'model.layers.0.input_layernorm.weight'" in (report.not_run or "")


def test_a_carried_tensor_that_is_not_listed_is_an_error(hybrid_int4: Path, tmp_path: Path) -> None:
    copy = oracle.copy(hybrid_int4, tmp_path / "copy")
    manifest = json.loads((copy / "quantkit.json").read_text())
    manifest["carried"].pop("lm_head.weight")
    (copy / "quantkit.json").write_text(json.dumps(manifest))
    digest = SourceFile(copy / "model.safetensors").sha256()
    assert digest == manifest["files"]["model.safetensors"]
    with raises(CheckpointError, " 19 ", " 20", path=copy / "quantkit.json"):
        verify(copy)
