"""Qwen3-Next through the jobs: its projections are joined key head by key head."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from architecture_cases import CASES
from diagnoses import require_sound
from error_parts import raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.errors import RequestError, UnsupportedError
from quantkit.model.load import load_model
from quantkit.quality.verify import Verdict, verify
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

VOCABULARY = 2048  # of the demo's tokenizer
UNCHECKED: dict[str, Any] = {"source_check": False, "accept_quality_loss": True}
INT4, INT8 = QuantScheme.parse("int4-g32"), QuantScheme.parse("int8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = CASES["qwen3-next"]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "max_position_embeddings": 600,
    }
    folder = tmp_path_factory.mktemp("qwen3-next") / "source"
    oracle.save(oracle.make(kind, **{**changes, **sizes}), folder)
    shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    return folder


def test_gptq_leaves_delta_rules_as_they_are(source: Path, tmp_path: Path) -> None:
    made = quantkit.quantize(
        source, tmp_path / "made", INT4, calibration=EXCERPT, samples=16, length=64, **UNCHECKED
    )
    assert made.manifest.get("run_by") is None
    schemes = {name: one["scheme"] for name, one in made.manifest["modules"].items()}
    assert schemes["model.layers.1.self_attn.q_proj"] == "int4-g32"
    assert schemes["model.layers.0.mlp.experts.3.up_proj"] == "int4-g32"
    assert schemes["model.layers.1.mlp.up_proj"] == "int4-g32"
    delta = {name: scheme for name, scheme in schemes.items() if ".linear_attn." in name}
    assert len(delta) == 2 * 2
    assert set(delta.values()) == {None}
    assert any("linear_attn.in_proj_qkvz" in note for note in made.notes)
    assert verify(source, made.path).verdict is Verdict.WITHIN_BOUND
    require_sound(made.path)


def test_a_recipe_that_names_delta_rules_quantizes_them(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(INT4, (Override("*.linear_attn.*", INT8),))
    made = quantkit.quantize(source, tmp_path / "made", recipe, method="rtn", **UNCHECKED)
    schemes = {name: one["scheme"] for name, one in made.manifest["modules"].items()}
    prefix = "model.layers.0.linear_attn."
    assert schemes[prefix + "in_proj_qkvz"] == schemes[prefix + "out_proj"] == "int8"
    # Two numbers for each head decide what a state keeps.
    assert prefix + "in_proj_ba" not in schemes
    model = load_model(made.path, dtype=torch.float32, backend="reference", device="cpu")
    model.config = replace(model.config, eos_token_ids=())
    prompt = oracle.random_tokens(70, vocabulary=VOCABULARY)
    found = list(quantkit.generate(model, prompt[0].tolist(), max_new_tokens=8))
    assert found == oracle.greedy(oracle.load(made.path), prompt, 8)


def test_few_bits_for_what_changes_a_state_are_refused(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(INT4, (Override("*.linear_attn.in_proj_qkvz", INT4),))
    with raises(RequestError, "in_proj_qkvz"):
        quantkit.quantize(source, tmp_path / "made", recipe, method="rtn", **UNCHECKED)


def test_what_gguf_and_mlx_do_not_have_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    # Layers without experts.
    with raises(UnsupportedError, "qwen3next"):
        quantkit.convert(source, tmp_path / "gguf", to="gguf")
    with raises(UnsupportedError, "mlx", "qwen3_next"):
        quantkit.quantize(source, tmp_path / "mlx", INT4, to="mlx", method="rtn", **UNCHECKED)


def test_a_config_is_written_as_it_is_read(source: Path) -> None:
    raw = json.loads((source / "config.json").read_text())
    for changes in ({}, {"norm_topk_prob": False}, {"decoder_sparse_step": 2}):
        config = config_from_hf({**raw, **changes}, "config.json")
        assert config_from_hf(config_to_hf(config), "config.json") == config


def test_shares_of_experts_are_normalized_if_a_config_does_not_say(source: Path) -> None:
    raw = json.loads((source / "config.json").read_text())
    del raw["norm_topk_prob"]
    experts = config_from_hf(raw, "config.json").experts
    assert experts is not None
    assert experts.normalized


@pytest.mark.parametrize("case", ["qwen3-next", "nemotron-h"])
def test_layers_for_prediction_are_copied_by_transformers_and_left_out_to_generate(
    case: str, tmp_path: Path
) -> None:
    kind, changes = CASES[case]
    plain = oracle.save(oracle.make(kind, **{**changes, "hidden_size": 128}), tmp_path / "plain")
    folder = oracle.copy(plain, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    layer = torch.randn(128, 128)
    save_file(
        {**tensors, "mtp.layers.0.eh_proj.weight": layer},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    made = quantkit.quantize(folder, tmp_path / "made", INT4, method="rtn", **UNCHECKED)
    assert str(made.manifest["run_by"]).startswith("transformers")
    stored = load_file(made.path / "model.safetensors")
    assert torch.equal(stored["mtp.layers.0.eh_proj.weight"], layer)
    with raises(UnsupportedError, "mtp.layers.0.eh_proj.weight"):
        quantkit.quantize(folder, tmp_path / "own", INT4, via="own", method="rtn", **UNCHECKED)
    tokens = oracle.random_tokens(9)
    for source in (folder, made.path):
        model = load_model(source, dtype=torch.float32, backend="reference", device="cpu")
        with torch.inference_mode():
            found = model(tokens)
        assert (found - oracle.logits(oracle.load(source), tokens)).abs().max() < 1e-4
