"""Qwen3.5 through the jobs: delta rules keep their floats unless a recipe names them."""

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

import quantkit
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.data.files import DEMO_MODEL
from quantkit.errors import CheckpointError, RequestError
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

VOCABULARY = 2048  # of the demo's tokenizer
UNCHECKED: dict[str, Any] = {"source_check": False, "accept_quality_loss": True, "method": "rtn"}
INT4 = QuantScheme.parse("int4-g32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, changes = CASES["qwen3-5"]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "max_position_embeddings": 600}
    folder = tmp_path_factory.mktemp("qwen3-5") / "source"
    oracle.save(oracle.make(kind, **{**changes, **sizes}), folder)
    shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    return folder


def _quantized(made: quantkit.QuantizeResult) -> set[str]:
    modules = made.manifest["modules"]
    return {name for name, entry in modules.items() if entry["scheme"] is not None}


def test_delta_rules_stay_floats_and_a_note_names_them(source: Path, tmp_path: Path) -> None:
    made = quantkit.quantize(source, tmp_path / "made", "int4-g32", **UNCHECKED)
    names = _quantized(made)
    assert "model.layers.1.self_attn.q_proj" in names
    assert not any(".linear_attn." in name for name in names)
    assert any("linear_attn.in_proj_qkv" in note for note in made.notes)
    require_sound(made.path)


def test_a_recipe_that_names_delta_rules_quantizes_them(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(INT4, (Override("*.linear_attn.*", QuantScheme.parse("int8")),))
    made = quantkit.quantize(source, tmp_path / "made", recipe, **UNCHECKED)
    names = {name for name in _quantized(made) if ".linear_attn." in name}
    leaves = {name.rpartition(".")[2] for name in names}
    # Not those that decide what a state keeps: they have an output for each head only.
    assert leaves == {"in_proj_qkv", "in_proj_z", "out_proj"}
    model = load_model(made.path, dtype=torch.float32, backend="reference", device="cpu")
    model.config = replace(model.config, eos_token_ids=())
    prompt = oracle.random_tokens(70, vocabulary=VOCABULARY)
    found = list(quantkit.generate(model, prompt[0].tolist(), max_new_tokens=8))
    assert found == oracle.greedy(oracle.load(made.path), prompt, 8)


def test_few_bits_for_what_changes_a_state_are_refused(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(INT4, (Override("*.linear_attn.in_proj_qkv", INT4),))
    with raises(RequestError, "in_proj_qkv"):
        quantkit.quantize(source, tmp_path / "made", recipe, **UNCHECKED)


def test_states_are_a_convolution_and_a_matrix_of_each_head(source: Path) -> None:
    model = load_model(source, device="cpu")
    shapes = [[tuple(t.shape) for t in layer.tensors()] for layer in Engine(model, 9)._cache.layers]
    # 2 key heads and 4 value heads of 16, 3 earlier tokens.
    states = [(1, 3, 128), (1, 4, 16, 16)]
    assert shapes == [states, [(1, 2, 9, 16)] * 2, states]


def test_a_config_is_written_as_it_is_read(source: Path) -> None:
    for folder, changes in ((source, {}), (source, {"partial_rotary_factor": 1.0})):
        raw = {**json.loads((folder / "config.json").read_text()), **changes}
        config = config_from_hf(raw, "config.json")
        assert config_from_hf(config_to_hf(config), "config.json") == config


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["linear_attention"]},
        {"layer_types": ["linear_attention", "full_attention", "conv"]},
        {"linear_num_value_heads": 3},
        {"layer_types": None, "full_attention_interval": 0},
    ],
)
def test_layers_that_make_no_sense_are_refused(changes: dict[str, Any], source: Path) -> None:
    raw = json.loads((source / "config.json").read_text())
    with pytest.raises(CheckpointError):
        config_from_hf({**raw, **changes}, "config.json")
