"""Models of families that only transformers knows, looked at by `doctor` and `inspect`."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import oracle
import pytest
from error_parts import raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import UnsupportedError

CLASS = "which tensors transformers' class needs"


def test_a_model_is_looked_at_by_the_class_of_transformers(hybrid: Path, hybrid_int4: Path) -> None:
    for folder in (hybrid, hybrid_int4):
        assert not quantkit.diagnose(folder, runtime="transformers").findings
        found = quantkit.diagnose(folder)
        assert not found.findings
        assert CLASS in found.looked_at
        assert not any("its family is not known here" in one for one in found.left_out)


@pytest.mark.slow
def test_stacked_experts_that_were_quantized_are_all_there(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    made = quantkit.quantize(
        tiny_model("zaya"),
        tmp_path / "dst",
        "int4-g32",
        method="rtn",
        source_check=False,
        accept_quality_loss=True,
    )
    found = quantkit.diagnose(made.path)
    assert not found.findings
    assert CLASS in found.looked_at


def test_a_tensor_that_the_class_needs_is_missed(hybrid: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(hybrid, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.final_layernorm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (found,) = quantkit.diagnose(folder).findings
    assert found.rule.name == "refused"
    assert "model.final_layernorm.weight" in found.message


def test_what_it_predicts_is_measured(hybrid: Path) -> None:
    found = quantkit.diagnose(hybrid, deep=True)
    assert [one.rule.name for one in found.findings] == ["no-prediction"]  # its weights are random


def test_without_transformers_its_family_is_not_known(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "transformers" else find_spec(name),
    )
    (note,) = quantkit.diagnose(hybrid, runtime="transformers").findings
    assert note.rule.name == "unknown-family"
    diagnosis = quantkit.diagnose(hybrid)
    assert CLASS not in diagnosis.looked_at
    assert any("family" in part for part in diagnosis.left_out)
    with raises(UnsupportedError, path=hybrid / "config.json", options=["tensors_only"]):
        quantkit.inspect(hybrid)


def test_inspect_shows_what_transformers_runs(hybrid: Path, tmp_path: Path) -> None:
    inspected = quantkit.inspect(hybrid)
    assert inspected.run_by is not None
    assert inspected.run_by.startswith("transformers ")
    assert inspected.tensors == quantkit.inspect(hybrid, tensors_only=True).tensors
    unknown = shutil.copytree(hybrid, tmp_path / "model")
    oracle.edit_json(unknown / "config.json", model_type="nonesuch")
    with raises(UnsupportedError, path=unknown / "config.json", found="nonesuch"):
        quantkit.inspect(unknown)
