"""A folder that quantkit wrote before format version 2 of the manifest: it opens, verifies and
generates.
"""

from __future__ import annotations

import json
from pathlib import Path

import oracle
import pytest
import torch
from command import Capture, run
from paths import DATA

import quantkit
from quantkit.errors import CheckpointError
from quantkit.evals.evaluate import evaluate
from quantkit.formats import manifest
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint

HERE = DATA / "version1"
FOLDER = HERE / "model"
EXPECTED = json.loads((HERE / "expected.json").read_text())


def test_it_is_of_version_1() -> None:
    raw = json.loads((FOLDER / manifest.NAME).read_text())
    assert raw["format_version"] == 1
    assert {"plan", "tensors"} < set(raw)
    assert sum(path.stat().st_size for path in HERE.rglob("*")) < 300_000


def test_its_manifest_is_read_under_the_new_names() -> None:
    raw, read = json.loads((FOLDER / manifest.NAME).read_text()), manifest.read(FOLDER)
    assert read["recipe"] == raw["plan"]
    assert read["modules"] == raw["tensors"]
    renamed = {"plan", "tensors", "recipe", "modules"}
    assert {k: v for k, v in read.items() if k not in renamed} == {
        k: v for k, v in raw.items() if k not in renamed
    }


def test_it_opens_with_the_schemes_it_was_given() -> None:
    found = schemes(open_checkpoint(FOLDER))
    recorded = {
        module: facts["scheme"] for module, facts in manifest.read(FOLDER)["modules"].items()
    }
    assert {module: str(scheme) for module, scheme in found.items()} == {
        m: s for m, s in recorded.items() if s
    }
    assert set(recorded.values()) == {"int4-g32", "int4-g64", None}


def test_it_verifies(tmp_path: Path, capfd: Capture) -> None:
    code, out, err = run(capfd, "verify", FOLDER)
    assert (code, err) == (0, "")
    assert "all 5 files are as quantkit wrote them" in out
    assert out.count("perplexity") == 2
    changed = oracle.copy(FOLDER, tmp_path / "changed")
    oracle.edit_json(changed / "config.json", rms_norm_eps=1e-3)
    assert run(capfd, "verify", changed)[0] == 3


def test_its_quality_is_held_against_its_record(tmp_path: Path, capfd: Capture) -> None:
    changed = oracle.copy(FOLDER, tmp_path / "changed")
    made = json.loads((changed / manifest.NAME).read_text())
    made["quality"]["texts"][0]["perplexity"] *= 1.1
    (changed / manifest.NAME).write_text(json.dumps(made))
    code, _, err = run(capfd, "verify", changed)
    assert code == 8
    assert "is not what the manifest says" in err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_continues_a_prompt_as_it_did(dtype: torch.dtype) -> None:
    """But for tokens that are as likely as others, to a few steps of the dtype."""
    model, tokenizer = quantkit.load(FOLDER, device="cpu", dtype=dtype)
    ids, expected = tokenizer.encode(EXPECTED["prompt"]), torch.tensor(EXPECTED["tokens"])
    if dtype == torch.float32:
        assert (
            list(quantkit.generate(model, ids, max_new_tokens=len(expected))) == EXPECTED["tokens"]
        )
    text = torch.tensor([[*ids, *EXPECTED["tokens"]]])
    with torch.inference_mode():
        logits = model(text, torch.arange(text.shape[1]))[0, len(ids) - 1 : -1].float()
    likeliest = logits.amax(-1)
    assert (
        logits.gather(-1, expected[:, None])[:, 0] >= likeliest * (1 - 4 * torch.finfo(dtype).eps)
    ).all()


def test_inspect_says_what_made_it(capfd: Capture) -> None:
    code, out, err = run(capfd, "inspect", FOLDER)
    assert (code, err) == (0, "")
    assert "made by: quantkit 0.1.0 (quantize, method gptq)" in out
    assert "int4-g32" in out


def test_it_converts_and_the_copy_has_a_manifest_of_this_version(tmp_path: Path) -> None:
    quantkit.convert(FOLDER, tmp_path / "out")
    assert quantkit.verify(FOLDER, tmp_path / "out").verdict.value == 0
    assert json.loads((tmp_path / "out" / manifest.NAME).read_text())["format_version"] == 2


def test_its_worst_layers_are_reported_by_an_evaluation(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The people of the United States. " * 40)
    found = evaluate([FOLDER], texts=[text], window=64)
    assert found.layer_error == "output_error"
    assert len(found.rows[0].layer_errors) == 13


def test_a_manifest_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    newer = oracle.copy(FOLDER, tmp_path / "newer")
    oracle.edit_json(newer / manifest.NAME, format_version=manifest.FORMAT_VERSION + 1)
    with pytest.raises(CheckpointError, match="was written by a newer quantkit"):
        manifest.read(newer)
