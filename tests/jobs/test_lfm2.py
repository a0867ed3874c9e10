"""LFM2 through every job: its short convolutions are quantized, measured, generated and served like
attention.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from architecture_cases import CASES
from command import Capture, run
from diagnoses import require_sound
from safetensors.torch import load_file
from served import started

import quantkit
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.errors import CheckpointError
from quantkit.model.load import load_model
from quantkit.quality.verify import Verdict, verify

VOCABULARY = 2048  # of the demo's tokenizer
KINDS = ("lfm2", "lfm2-moe")


def _save(case: str, folder: Path) -> Path:
    kind, changes = CASES[case]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "max_position_embeddings": 600,
    }
    oracle.save(oracle.make(kind, **{**changes, **sizes}), folder)
    shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("lfm2")
    return {case: _save(case, base / case) for case in KINDS}


@pytest.fixture(scope="module")
def quantized(
    sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, quantkit.QuantizeResult]:
    base = tmp_path_factory.mktemp("lfm2-int4")
    options: dict[str, Any] = {"calibration": EXCERPT, "samples": 16, "length": 64}
    return {
        case: quantkit.quantize(
            source, base / case, "int4-g32", source_check=False, accept_quality_loss=True, **options
        )
        for case, source in sources.items()
    }


@pytest.mark.parametrize("case", KINDS)
def test_linears_around_convolutions_are_quantized_and_filters_stay(
    case: str, sources: dict[str, Path], quantized: dict[str, quantkit.QuantizeResult]
) -> None:
    made = quantized[case]
    schemes = {name: one["scheme"] for name, one in made.manifest["modules"].items()}
    for layer in (0, 2):
        for leaf in ("in_proj", "out_proj"):
            assert schemes[f"model.layers.{layer}.conv.{leaf}"] == "int4-g32"
    floats, stored = (
        load_file(folder / "model.safetensors") for folder in (sources[case], made.path)
    )
    kept = [name for name in floats if name.endswith((".conv.conv.weight", "expert_bias"))]
    assert len(kept) == (2 if case == "lfm2" else 4)
    for name in kept:
        assert torch.equal(floats[name], stored[name])
    assert made.manifest.get("run_by") is None
    assert verify(sources[case], made.path).verdict is Verdict.WITHIN_BOUND


@pytest.mark.parametrize("case", KINDS)
def test_gptq_loses_less_than_rounding(
    case: str,
    sources: dict[str, Path],
    quantized: dict[str, quantkit.QuantizeResult],
    tmp_path: Path,
) -> None:
    rounded = quantkit.quantize(
        sources[case],
        tmp_path / "rounded",
        "int4-g32",
        method="rtn",
        source_check=False,
        accept_quality_loss=True,
    )
    kl = []
    for made in (quantized[case], rounded):
        assert made.quality is not None
        kl.append(max(text.kl for text in made.quality.texts))
    assert kl[0] < kl[1]


@pytest.mark.parametrize("case", KINDS)
def test_the_doctor_finds_nothing_and_inspect_counts_the_cache(
    case: str, quantized: dict[str, quantkit.QuantizeResult]
) -> None:
    require_sound(quantized[case].path)
    facts = quantkit.inspect(quantized[case].path)
    assert facts.runnable
    # Of one layer with attention: 2 KV heads of 16, keys and values, 4 bytes each.
    assert facts.cache_bytes_per_token == 2 * 2 * 16 * 4


@pytest.mark.parametrize("case", KINDS)
def test_greedy_tokens_are_those_of_transformers(
    case: str, quantized: dict[str, quantkit.QuantizeResult], capfd: Capture
) -> None:
    made = quantized[case].path
    model = load_model(made, dtype=torch.float32, backend="reference", device="cpu")
    model.config = replace(model.config, eos_token_ids=())
    prompt = oracle.random_tokens(9, vocabulary=VOCABULARY)
    found = list(quantkit.generate(model, prompt[0].tolist(), max_new_tokens=12))
    # Experts may be fused only if all have one scheme, as here.
    assert found == oracle.greedy(oracle.load(made), prompt, 12)
    words = ["Once upon a time", "--max-new-tokens", "8", "--device", "cpu"]
    code, out, _ = run(capfd, "generate", made, *words)
    assert code == 0
    assert out.strip()


def test_the_server_answers_two_requests_with_the_same_beginning(
    quantized: dict[str, quantkit.QuantizeResult],
) -> None:
    with started(quantized["lfm2"].path, "--dtype", "fp32") as (_, address):
        texts = []
        for _ in range(2):
            body = {"prompt": "Once upon a time " * 30, "max_tokens": 8, "temperature": 0}
            request = urllib.request.Request(
                f"{address}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                texts.append(json.load(answer)["choices"][0]["text"])
    assert texts[0] == texts[1]
    assert texts[0]


def test_training_passes_gradients_through_convolutions(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"source_check": False, "accept_quality_loss": True}
    rounded = quantkit.quantize(
        sources["lfm2"], tmp_path / "int4", "int4-g32", method="rtn", **options
    )
    made = quantkit.refine(
        rounded.path,
        tmp_path / "refined",
        against=sources["lfm2"],
        calibration=EXCERPT,
        epochs=1,
        source_check=False,
        samples=16,
        length=64,
        accept_quality_loss=True,
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (rounded.path, made.path)
    )
    scale = "model.layers.0.conv.in_proj.weight_scale"
    assert not torch.equal(before[scale], after[scale])


def test_a_config_is_written_as_it_is_read(sources: dict[str, Path]) -> None:
    for folder in sources.values():
        raw = json.loads((folder / "config.json").read_text())
        config = config_from_hf(raw, "config.json")
        assert config_from_hf(config_to_hf(config), "config.json") == config


def test_the_published_config_of_lfm2_has_its_width_and_its_layers() -> None:
    """The keys of LFM2-1.2B's config.json that its repository states, among them older names."""
    raw = {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "intermediate_size": 12288,
        "conv_L_cache": 3,
        "conv_bias": False,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 128000,
        "bos_token_id": 1,
        "eos_token_id": 7,
        "tie_embedding": True,
        "torch_dtype": "bfloat16",
    }
    config = config_from_hf(raw, "config.json")
    assert config.intermediate_size == 8192
    assert config.attention_layers == [2, 5, 8, 10, 12, 14]
    assert config.tied_embeddings
    assert config.state_shapes(0) == ((2, 2048),)
    assert config.state_shapes(2) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["conv", "full_attention"]},
        {"layer_types": ["conv", "conv", "sliding_attention"]},
        {"layer_types": None, "full_attn_idxs": [0, True]},
        {"conv_L_cache": 0},
        {"block_ff_dim": 0},
    ],
)
def test_layers_that_make_no_sense_are_refused(
    changes: dict[str, Any], sources: dict[str, Path]
) -> None:
    raw = json.loads((sources["lfm2"] / "config.json").read_text())
    with pytest.raises(CheckpointError):
        config_from_hf({**raw, **changes}, "config.json")
