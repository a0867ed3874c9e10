"""Granite 4, Bamba and Nemotron H through the jobs: Mamba-2 keeps its floats unless a recipe names
it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lora
import oracle
import pytest
import torch
from architecture_cases import CASES
from diagnoses import require_sound
from error_parts import raises
from safetensors.torch import load_file

import quantkit
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.architectures.topology import input_groups
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.errors import CheckpointError, RequestError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.model.feed_forward import Experts
from quantkit.model.load import load_model
from quantkit.quality.verify import Verdict, verify
from quantkit.runtime.engine import Engine
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import QuantScheme

VOCABULARY = 2048  # of the demo's tokenizer
KINDS = ("granitemoehybrid", "granitemoehybrid-moe", "bamba", "nemotron-h", "nemotron-h-moe-latent")
INT4, INT8 = QuantScheme.parse("int4-g32"), QuantScheme.parse("int8")
UNCHECKED: dict[str, Any] = {"source_check": False, "accept_quality_loss": True, "method": "rtn"}


def _save(case: str, folder: Path) -> Path:
    kind, changes = CASES[case]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 64,
        "shared_intermediate_size": 96,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "max_position_embeddings": 600,
    }
    oracle.save(oracle.make(kind, **{**changes, **sizes}), folder)
    shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("mamba")
    return {case: _save(case, base / case) for case in KINDS}


@pytest.fixture(scope="module")
def quantized(
    sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, quantkit.QuantizeResult]:
    base = tmp_path_factory.mktemp("mamba-int4")
    options: dict[str, Any] = {"calibration": EXCERPT, "samples": 16, "length": 64}
    return {
        case: quantkit.quantize(
            source, base / case, "int4-g32", source_check=False, accept_quality_loss=True, **options
        )
        for case, source in sources.items()
    }


@pytest.mark.parametrize("case", KINDS)
def test_gptq_leaves_state_spaces_as_they_are(
    case: str, sources: dict[str, Path], quantized: dict[str, quantkit.QuantizeResult]
) -> None:
    made = quantized[case]
    assert made.manifest.get("run_by") is None
    schemes = {name: one["scheme"] for name, one in made.manifest["modules"].items()}
    config = open_checkpoint(made.path).config
    for layer in range(config.num_layers):
        for group in input_groups(config, layer):
            expected = None if group.site.startswith("mamba2") else "int4-g32"
            for module in group.modules:
                assert schemes[f"model.layers.{layer}.{module}"] == expected
    assert any("mamba.in_proj" in note for note in made.notes)
    floats, stored = (
        load_file(folder / "model.safetensors") for folder in (sources[case], made.path)
    )
    layers = {name.rpartition(".")[0] for name in floats if name.endswith(".A_log")}
    kept = [name for name in floats if name.startswith(tuple(f"{layer}." for layer in layers))]
    assert len(kept) == len(layers) * 8
    for name in kept:
        assert torch.equal(floats[name], stored[name])
    assert verify(sources[case], made.path).verdict is Verdict.WITHIN_BOUND
    require_sound(made.path)


@pytest.mark.parametrize("case", KINDS)
def test_greedy_tokens_are_those_of_transformers(
    case: str, quantized: dict[str, quantkit.QuantizeResult], tmp_path: Path
) -> None:
    model = load_model(quantized[case].path, dtype=torch.float32, backend="reference", device="cpu")
    model.config = replace(model.config, eos_token_ids=())
    prompt = oracle.random_tokens(70, vocabulary=VOCABULARY)
    found = list(quantkit.generate(model, prompt[0].tolist(), max_new_tokens=12))
    # transformers reads no quantized experts of this family.
    floats = quantkit.convert(
        quantized[case].path, tmp_path / "floats", dequantize=True, source_check=False
    )
    assert found == oracle.greedy(oracle.load(floats.path), prompt, 12)


def test_the_embedding_of_nemotron_h_is_read_quantized(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """Its name on disk is no other family's."""
    options = {**UNCHECKED, "embedding": "int8"}
    made = quantkit.quantize(sources["nemotron-h"], tmp_path / "made", "int8", **options)
    embedding = open_checkpoint(made.path).load("model.embed_tokens.weight")
    assert isinstance(embedding, QuantTensor)
    model = load_model(made.path, dtype=torch.float32, backend="reference", device="cpu")
    model.config = replace(model.config, eos_token_ids=())
    prompt = oracle.random_tokens(20, vocabulary=VOCABULARY)
    found = list(quantkit.generate(model, prompt[0].tolist(), max_new_tokens=8))
    floats = quantkit.convert(made.path, tmp_path / "floats", dequantize=True, source_check=False)
    assert found == oracle.greedy(oracle.load(floats.path), prompt, 8)


def test_a_recipe_that_names_state_spaces_quantizes_them(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    recipe = Recipe(INT4, (Override("*.mamba.*", INT8),))
    made = quantkit.quantize(sources["granitemoehybrid"], tmp_path / "made", recipe, **UNCHECKED)
    schemes = {name: one["scheme"] for name, one in made.manifest["modules"].items()}
    for leaf in ("in_proj", "out_proj"):
        assert schemes[f"model.layers.0.mamba.{leaf}"] == "int8"
    model = load_model(made.path, dtype=torch.float32, backend="reference", device="cpu")
    model.config = replace(model.config, eos_token_ids=())
    prompt = oracle.random_tokens(20, vocabulary=VOCABULARY)
    found = list(quantkit.generate(model, prompt[0].tolist(), max_new_tokens=8))
    assert found == oracle.greedy(oracle.load(made.path), prompt, 8)


def test_few_bits_for_what_changes_a_state_are_refused(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    recipe = Recipe(INT4, (Override("*.mamba.in_proj", INT4),))
    with raises(RequestError, "in_proj"):
        quantkit.quantize(sources["granitemoehybrid"], tmp_path / "made", recipe, **UNCHECKED)


@pytest.mark.parametrize(
    ("case", "modules"),
    [
        ("granitemoehybrid", ["in_proj", "q_proj", "input_linear"]),
        ("nemotron-h", ["in_proj", "q_proj", "up_proj"]),
    ],
)
def test_an_adapter_is_merged_into_a_state_space(
    case: str, modules: list[str], sources: dict[str, Path], tmp_path: Path
) -> None:
    source = sources[case]
    adapter = lora.save_adapter(source, tmp_path / "adapter", target_modules=modules)
    made = quantkit.convert(source, tmp_path / "made", lora=adapter, source_check=False)
    tokens = oracle.random_tokens(30, vocabulary=VOCABULARY)
    with torch.inference_mode():
        found = load_model(made.path, dtype=torch.float32)(tokens)
    assert (found - oracle.logits(lora.loaded(source, adapter), tokens)).abs().max() < 1e-4


def test_states_are_a_convolution_and_a_matrix_of_each_head(sources: dict[str, Path]) -> None:
    model = load_model(sources["granitemoehybrid"], device="cpu")
    shapes = [[tuple(t.shape) for t in layer.tensors()] for layer in Engine(model, 9)._cache.layers]
    # 8 heads of 32, and 2 groups with states of 12 rows; 3 earlier tokens.
    states = [(1, 3, 8 * 32 + 2 * 2 * 12), (1, 8, 12, 32)]
    assert shapes == [states, [(1, 2, 9, 16)] * 2, states]


@pytest.mark.parametrize("case", KINDS)
def test_mlx_is_refused_by_name(
    case: str,
    sources: dict[str, Path],
    quantized: dict[str, quantkit.QuantizeResult],
    tmp_path: Path,
) -> None:
    name = CASES[case][0]
    with raises(UnsupportedError, "mlx", name):
        quantkit.quantize(sources[case], tmp_path / "mlx", "int4-g32", to="mlx", **UNCHECKED)
    with raises(UnsupportedError, "mlx", name):
        quantkit.convert(quantized[case].path, tmp_path / "mlx", to="mlx", source_check=False)


def test_a_config_is_written_as_it_is_read(sources: dict[str, Path]) -> None:
    for folder in sources.values():
        raw = json.loads((folder / "config.json").read_text())
        variants: list[dict[str, Any]] = [{}, {"time_step_limit": [0.1, 0.5]}]
        for changes in (*variants, {"position_embedding_type": "rope"}):
            config = config_from_hf({**raw, **changes}, "config.json")
            assert config_from_hf(config_to_hf(config), "config.json") == config


def test_infinite_limits_of_steps_are_read_however_they_are_spelled(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """As older releases of transformers wrote them, which is not JSON."""
    folder = oracle.copy(sources["granitemoehybrid"], tmp_path / "copy")
    raw = json.loads((folder / "config.json").read_text())
    for limit, expected in ((float("inf"), [0.0, float("inf")]), (0.5, [0.0, 0.5])):
        (folder / "config.json").write_text(json.dumps({**raw, "time_step_limit": [0.0, limit]}))
        made = quantkit.convert(folder, tmp_path / f"made-{limit}", source_check=False)
        written = (made.path / "config.json").read_text()
        assert "Infinity" not in json.dumps(json.loads(written)).replace('"Infinity"', "")
        assert list(oracle.load(made.path).config.time_step_limit) == expected


def test_the_rotated_part_of_bamba_is_read_where_transformers_reads_it(
    sources: dict[str, Path],
) -> None:
    raw = json.loads((sources["bamba"] / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 1e4}
    for changes, expected in (
        ({"partial_rotary_factor": 1.0, "rope_parameters": rope}, 8),
        ({"rope_parameters": {**rope, "partial_rotary_factor": 0.25}}, 4),
        ({"rope_parameters": {**rope, "partial_rotary_factor": 1.0}}, None),
    ):
        config = config_from_hf({**raw, **changes}, "config.json")
        assert config.rope.rotary_dim == expected
        assert config_from_hf(config_to_hf(config), "config.json") == config


NEMOTRON = {
    "model_type": "nemotron_h",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}


def test_layers_of_nemotron_h_are_read_from_the_name_that_transformers_prefers() -> None:
    kinds = {"M": "mamba2", "*": "attention", "-": "none", "E": "none"}
    for changes, expected in (
        ({}, "ME*-"),
        ({"hybrid_override_pattern": "M*-M", "num_hidden_layers": 9}, "M*-M"),
        ({"hybrid_override_pattern": "M*", "layers_block_type": ["mlp", "mamba"]}, "-M"),
        ({"layers_block_type": ["mlp"], "layer_types": ["attention", "moe"]}, "*E"),
    ):
        config = config_from_hf({**NEMOTRON, **changes}, "config.json")
        assert [layer.mixer for layer in config.layers] == [kinds[letter] for letter in expected]
        assert [layer.experts for layer in config.layers] == [one == "E" for one in expected]
        assert [layer.feed_forward for layer in config.layers] == [one in "-E" for one in expected]
        assert config_from_hf(config_to_hf(config), "config.json") == config


def test_older_names_of_nemotron_h_have_precedence_as_in_transformers() -> None:
    changes = {"mamba_d_conv": 3, "conv_kernel": 2, "mamba_n_groups": 4, "mamba_dt_min": 0.5}
    config = config_from_hf({**NEMOTRON, **changes}, "config.json")
    assert config.mamba2 is not None
    assert config.mamba2.convolution == 3
    assert config.mamba2.groups == 4
    # `time_step_limit` has no effect there, and no config has an upper limit.
    assert config.mamba2.step_limits == (0.5, float("inf"))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 2, "topk_group": 1},
        {"mlp_bias": True},
        {"mlp_hidden_act": "silu"},
        {"mamba_hidden_act": "gelu"},
        {"layers_block_type": ["mamba", "conv"]},
        {"hybrid_override_pattern": "MX"},
        {"n_groups": 3},
        {"time_step_min": -1.0},
    ],
)
def test_what_nemotron_h_does_not_support_is_refused_by_name(changes: dict[str, Any]) -> None:
    with raises((CheckpointError, UnsupportedError)):
        config_from_hf({**NEMOTRON, **changes}, "config.json")


@pytest.mark.parametrize("numbers", ["1", [True], [-1], [0.5]])
def test_layers_of_bamba_that_make_no_sense_are_refused(
    numbers: Any, sources: dict[str, Path]
) -> None:
    raw = json.loads((sources["bamba"] / "config.json").read_text())
    with pytest.raises(CheckpointError):
        config_from_hf({**raw, "attn_layer_indices": numbers}, "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["linear_attention"]},
        {"layer_types": ["linear_attention", "full_attention", "sliding_attention"]},
        {"mamba_n_heads": 7},
        {"mamba_d_head": 5},
        {"mamba_n_groups": 3},
        {"mamba_d_state": None},
        {"time_step_limit": None},
        {"time_step_limit": [0.5, 0.1]},
        {"time_step_limit": [0.1]},
        {"num_local_experts": None},
    ],
)
def test_configs_that_make_no_sense_are_refused(
    changes: dict[str, Any], sources: dict[str, Path]
) -> None:
    raw = json.loads((sources["granitemoehybrid"] / "config.json").read_text())
    with pytest.raises(CheckpointError):
        config_from_hf({**raw, **changes}, "config.json")


def test_bfloat16_is_rounded_where_transformers_rounds_it(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """Norms and routers of Nemotron H compute in float32."""
    folder = quantkit.convert(
        sources["nemotron-h-moe-latent"], tmp_path / "bf16", dtype="bf16", source_check=False
    ).path
    ours = load_model(folder, backend="reference", device="cpu")
    theirs = oracle.load(folder, torch.bfloat16).model
    x = torch.randn(1, 50, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        assert torch.equal(ours.model.norm(x), theirs.norm_f(x))
        experts = ours.model.layers[1].mlp
        assert isinstance(experts, Experts)
        logits, _, numbers = theirs.layers[1].mixer.gate(x)
        torch.testing.assert_close(experts.logits(x)[0], logits, rtol=1e-5, atol=1e-5)
        found = experts.route(x)
        assert torch.equal(found[1][0].sort(-1)[0], numbers.sort(-1)[0])


def test_the_published_sizes_of_nemotron_h_are_those_of_its_layers() -> None:
    """The 4B model, by the keys of its first release."""
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    raw = {
        **NEMOTRON,
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": 52,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 112,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "mlp_hidden_act": "relu2",
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
    }
    config = config_from_hf(raw, "config.json")
    assert config.attention_layers == [place for place, one in enumerate(pattern) if one == "*"]
    states = ((3, 112 * 64 + 2 * 8 * 128), (112, 128, 64))
    for layer, letter in enumerate(pattern):
        assert config.state_shapes(layer) == (states if letter == "M" else ())
        assert config.layers[layer].feed_forward == (letter == "-")
    modules = {
        group.modules for layer in range(config.num_layers) for group in input_groups(config, layer)
    }
    assert ("mlp.up_proj",) in modules
    assert not any("mlp.gate_proj" in names for names in modules)
