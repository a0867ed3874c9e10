"""EXAONE 4, Cohere 2 and Hunyuan through the jobs: adapters and training; what their configs may
say.
"""

from __future__ import annotations

import json
import shutil
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
from quantkit.data.files import DEMO_MODEL, EXCERPT
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.model.load import load_model
from quantkit.xla.split import require_served

VOCABULARY = 2048  # of the demo's tokenizer
KINDS = ("cohere2-features", "exaone4-features", "hunyuan-dense-features")
UNCHECKED: dict[str, Any] = {"source_check": False, "accept_quality_loss": True}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    folders = {}
    for case in KINDS:
        kind, changes = CASES[case]
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "max_position_embeddings": 600}
        folder = folders[case] = base / case
        oracle.save(oracle.make(kind, **{**changes, **sizes}), folder)
        shutil.copy(DEMO_MODEL / "tokenizer.model", folder)
    return folders


@pytest.mark.parametrize("case", KINDS)
def test_an_adapter_is_merged_as_peft_merges_it(
    case: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    adapter = lora.save_adapter(sources[case], tmp_path / "adapter")
    made = quantkit.convert(sources[case], tmp_path / "out", lora=adapter, source_check=False)
    tokens = oracle.random_tokens(20, batch=2, vocabulary=VOCABULARY)
    expected = oracle.logits(lora.loaded(sources[case], adapter), tokens)
    with torch.inference_mode():
        found = load_model(made.path, dtype=torch.float32, device="cpu")(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", KINDS)
def test_training_moves_scales_and_the_doctor_finds_nothing(
    case: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"calibration": EXCERPT, "samples": 16, "length": 64}
    rounded = quantkit.quantize(
        sources[case], tmp_path / "int4", "int4-g32", method="rtn", **UNCHECKED
    )
    require_sound(rounded.path)
    made = quantkit.refine(
        rounded.path,
        tmp_path / "refined",
        against=sources[case],
        epochs=1,
        **options,
        **UNCHECKED,
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (rounded.path, made.path)
    )
    for leaf in ("self_attn.q_proj", "mlp.down_proj"):
        scale = f"model.layers.1.{leaf}.weight_scale"
        assert not torch.equal(before[scale], after[scale])


def test_what_llama_cpp_does_not_compute_is_refused_by_name(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    for case, feature in (
        ("cohere2-features", "biases"),
        ("exaone4-features", "sliding windows"),
        ("hunyuan-dense-features", "biases"),
    ):
        with raises(UnsupportedError, feature):
            quantkit.convert(sources[case], tmp_path / case, to="gguf")


def test_xla_refuses_features_by_name(sources: dict[str, Path]) -> None:
    for case, feature in (
        ("cohere2-features", "parallel branches"),
        ("hunyuan-dense-features", "qk norm after rotary"),
    ):
        raw = json.loads((sources[case] / "config.json").read_text())
        with raises(UnsupportedError, CASES[case][0], feature):
            require_served(config_from_hf(raw, "config.json"))


def _raw(case: str, **changes: Any) -> dict[str, Any]:
    kind, settings = CASES[case]
    config = oracle.transformers.AutoConfig.for_model(kind, **{**oracle.SIZES, **settings})
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    for key, value in changes.items():
        if value is ...:
            del raw[key]
        else:
            raw[key] = value
    return raw


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.startswith(("cohere2", "exaone4", "hunyuan"))]
)
def test_a_config_is_written_as_it_is_read(case: str) -> None:
    config = config_from_hf(_raw(case), "config.json")
    assert config_from_hf(config_to_hf(config), "config.json") == config


def test_layers_with_a_window_alone_are_rotated() -> None:
    def read(case: str, **changes: Any) -> list[bool]:
        config = config_from_hf(_raw(case, **changes), "config.json")
        return [layer.rotary for layer in config.layers]

    full = ["full_attention"] * 3
    assert read("cohere2-features") == [False, True, True]
    assert read("cohere2-features", layer_types=full) == [False] * 3
    assert read("exaone4-features") == [True, False, True]
    assert read("exaone4-features", layer_types=full) == [False] * 3
    # Without a width for windows, there is no layer to leave out.
    assert read("exaone4-features", layer_types=full, sliding_window=None) == [True] * 3
    # The published pattern, next to a list of the layers.
    assert read("exaone4-features", sliding_window_pattern="LLLG") == [True, False, True]


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        # transformers fails to list the layers.
        ("exaone4-full", {"layer_types": ...}),
        ("exaone4-features", {"layer_types": ..., "sliding_window_pattern": "LLLG"}),
        ("exaone4-features", {"sliding_window": None}),
        ("cohere2-features", {"sliding_window": None}),
        ("hunyuan-dense", {"head_dim": ...}),
        ("hunyuan-dense", {"rope_parameters": {"rope_type": "default", "alpha": 3.0}}),
        (
            "hunyuan-dense",
            {"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "alpha": 3.0}},
        ),
    ],
)
def test_configs_that_transformers_does_not_run_are_refused(
    case: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(QuantkitError) as refused:
        config_from_hf(_raw(case, **changes), "config.json")
    assert isinstance(refused.value, (CheckpointError, UnsupportedError))


def test_a_fixed_alpha_changes_the_base_alone() -> None:
    published = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    raw = _raw("hunyuan-dense", head_dim=128, rope_parameters=..., rope_scaling=published)
    rope = config_from_hf(raw, "config.json").rope
    assert rope.type == "default"
    assert rope.theta == pytest.approx(10000 * 1000 ** (128 / 126))
