"""Whether transformers loads a result is found by its own loader, and said."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from error_parts import raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.via_transformers.packed_loading import loading_problem

Tiny = Callable[[str], Path]


def _rounded(source: Path, dst: Path) -> quantkit.QuantizeResult:
    return quantkit.quantize(
        source,
        dst,
        "int4-g32",
        method="rtn",
        via="transformers",
        source_check=False,
        accept_quality_loss=True,
    )


@pytest.mark.slow
def test_a_result_that_transformers_loads_has_no_note(hybrid_int4: Path) -> None:
    assert loading_problem(hybrid_int4) is None
    assert "does not load" not in (hybrid_int4 / "README.md").read_text()


def test_a_tensor_that_its_loader_does_not_find_is_named(hybrid_int4: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(hybrid_int4, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.final_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.final_layernorm.weight" in (loading_problem(folder) or "")


@pytest.mark.parametrize("package", ["accelerate", "compressed_tensors"])
def test_nothing_is_said_if_what_loads_it_is_not_installed(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "nothing"
    assert loading_problem(folder) is not None
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    assert loading_problem(folder) is None


@pytest.mark.slow
def test_stacked_experts_that_it_does_not_load_are_a_note_and_on_the_card(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    made = _rounded(tiny_model("granitemoe"), tmp_path / "dst")
    (note,) = (note for note in made.notes if "does not load the packed weights" in note)
    assert "experts" in note
    assert "dequantize=True" in note
    assert "transformers does not load the packed weights" in (made.path / "README.md").read_text()


@pytest.mark.slow
def test_without_its_class_a_config_is_that_of_a_language_model(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_model("bloom"), tmp_path / "src")
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]
    (source / "config.json").write_text(json.dumps(config))
    without_class = _rounded(source, tmp_path / "without").quality.texts
    with_class = _rounded(tiny_model("bloom"), tmp_path / "with").quality.texts
    assert [(text.text, text.source_perplexity) for text in without_class] == [
        (text.text, text.source_perplexity) for text in with_class
    ]
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["BloomModel"]}))
    with raises(UnsupportedError, "BloomModel"):
        _rounded(source, tmp_path / "body")


def test_a_damaged_file_is_not_an_unknown_architecture(tiny_model: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_model("bloom"), tmp_path / "src")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with raises(CheckpointError, path=weights):
        quantkit.quantize(source, tmp_path / "dst", "int4-g32")
