"""What inspect, the model card and the plan say of a model that transformers runs."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import yaml
from command import Capture, run

import quantkit
from quantkit.errors import RequestError, UnsupportedError
from quantkit.via_transformers import forward

RUN_BY = f"transformers {importlib.metadata.version('transformers')}"


def _words(folder: Path) -> str:
    """The text of a card, without line breaks."""
    return " ".join((folder / "README.md").read_text().split())


def test_inspect_states_what_ran_the_model(hybrid: Path, hybrid_int4: Path, tmp_path: Path) -> None:
    found = quantkit.inspect(hybrid_int4)
    assert (found.runnable, found.run_by) == (False, RUN_BY)
    assert found.lines()[1] == f"  run by {RUN_BY}"
    assert "  tokenizer: sentencepiece, 2048 tokens, BOS 1" in found.lines()
    plain = quantkit.inspect(hybrid, tensors_only=True)
    assert plain.run_by is None
    assert plain.lines()[1] == "  known by its tensors only: not run here"
    rounded = quantkit.quantize(hybrid, tmp_path / "rounded", "int8", tensors_only=True).path
    assert quantkit.inspect(rounded).lines()[1] == plain.lines()[1]


def test_inspecting_it_imports_no_transformers(hybrid_int4: Path) -> None:
    code = (
        f"import sys, quantkit\nquantkit.inspect({str(hybrid_int4)!r})\n"
        "assert not {'torch', 'transformers', 'greenlet'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_card_has_the_figures_and_how_to_load_it(hybrid_int4: Path) -> None:
    card = _words(hybrid_int4)
    assert (
        f"Measured by quantkit against the source, both run by {RUN_BY}, in float32, on texts"
        in card
    )
    assert (
        f"did not run the model itself: {RUN_BY} ran it for the figures above and for calibration."
        in card
    )
    assert "no logits were compared" not in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    assert "checks them and measures the perplexities again." in card
    header = yaml.safe_load((hybrid_int4 / "README.md").read_text().split("---")[1])
    assert header["pipeline_tag"] == "text-generation"
    oracle.load(hybrid_int4)  # as the card says


@pytest.mark.slow
def test_the_commands_of_the_card_run(hybrid_int4: Path, tmp_path: Path, capfd: Capture) -> None:
    (folder,) = set(re.findall(r"quantkit eval (\S+)", (hybrid_int4 / "README.md").read_text()))
    assert f'quantkit generate {folder} "Once upon a time" --backend transformers' in _words(
        hybrid_int4
    )
    assert (
        run(capfd, "generate", hybrid_int4, "Once upon a time", "--backend", "transformers")[0] == 0
    )


@pytest.mark.slow
def test_the_card_of_a_rounded_model_states_no_calibration(hybrid: Path, tmp_path: Path) -> None:
    made = quantkit.quantize(hybrid, tmp_path / "int8", "int8", source_check=False)
    assert f"{RUN_BY} ran it for the figures above. Load it" in _words(made.path)
    asymmetric = quantkit.quantize(
        hybrid, tmp_path / "asym", "int4-g32-asym", method="rtn", source_check=False
    )
    assert "transformers does not load the packed weights" in _words(asymmetric.path)
    assert "from_pretrained" not in _words(asymmetric.path)


def test_a_plan_foretells_the_result(hybrid: Path, hybrid_int4: Path, tmp_path: Path) -> None:
    planned = quantkit.plan.quantize(
        hybrid, tmp_path / "x", "int4-g32", via="transformers", samples=32
    )
    made = json.loads((hybrid_int4 / "quantkit.json").read_text())
    assert planned.layers["int4-g32"] == sum(
        one["scheme"] == "int4-g32" for one in made["modules"].values()
    )
    assert planned.disk_bytes == pytest.approx(
        sum(one.stat().st_size for one in hybrid_int4.iterdir()), rel=0.05
    )
    assert any(f"run by {RUN_BY}" in line for line in planned.lines())
    assert not (tmp_path / "x").exists()


def test_a_plan_makes_the_checks_of_the_command(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match="architecture is not supported"):
        quantkit.plan.quantize(hybrid, tmp_path / "x", "int4-g32", via="own")
    with pytest.raises(RequestError, match="no choice of schemes has this size"):
        quantkit.plan.quantize(hybrid, tmp_path / "x", target_bits=2)
    monkeypatch.setattr(forward, "is_installed", lambda: False)
    with pytest.raises(RequestError, match=r"pip install 'quantkit\[transformers\]'"):
        quantkit.plan.quantize(hybrid, tmp_path / "x", "int4-g32", via="transformers")
