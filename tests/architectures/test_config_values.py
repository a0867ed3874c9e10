"""Values of config.json and params.json that are of the wrong kind, out of range, or no JSON."""

from __future__ import annotations

import itertools
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from case_names import case
from command import Capture, run
from config_cases import ROPES, config_keys, transformers_config
from error_parts import raises
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from work import counted_calls

from quantkit.architectures.families import config_from_hf
from quantkit.architectures.meta_params import config_from_meta
from quantkit.architectures.topology import parameters
from quantkit.base.json_values import read_json, read_settings
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.model.rope import Rotary

COUNTS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
]
PARAMS = {
    "dim": 64,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
CONFIG = Path("x/config.json")
PARAMS_FILE = Path("x/params.json")
NO_COUNT = ["8", 8.0, True, [8], {"a": 8}, 0, -1, 2**31, 10**30, 10**400]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.save(oracle.make("llama"), tmp_path_factory.mktemp("model") / "hf")


def _rope(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**ROPES[kind], "rope_theta": 10000.0, **changes}}


def _from_meta(**changes: Any) -> Any:
    return config_from_meta(
        {**PARAMS, **changes},
        PARAMS_FILE,
        vocab_size=96,
        intermediate_size=96,
        tied_embeddings=False,
        dtype="float32",
    )


def test_a_count_is_a_whole_number_within_bounds() -> None:
    for key, value in itertools.product(COUNTS, NO_COUNT):
        with case(key, value):
            with raises(CheckpointError, f"'{key}'", path=CONFIG) as caught:
                config_from_hf({**config_keys("llama"), key: value}, CONFIG)
            assert " 1 to " in str(caught.value.expected)
            assert len(str(caught.value)) < 300


def test_a_count_of_meta_is_a_whole_number_within_bounds() -> None:
    keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "max_seq_len")
    for key, value in itertools.product(keys, NO_COUNT):
        with case(key, value):
            with raises(CheckpointError, f"'{key}'", path=PARAMS_FILE) as caught:
                _from_meta(**{key: value})
            assert " 1 to " in str(caught.value.expected)


def test_a_number_is_positive_and_within_bounds() -> None:
    values = ("1e-5", True, 0, -1e-5, 1e300, [1e-5], 10**400)
    for key, value in itertools.product(("rms_norm_eps", "rope_theta"), values):
        raw = {**config_keys("llama"), "rope_parameters": None, key: value}
        with case(key, value), raises(CheckpointError, f"'{key}'", path=CONFIG):
            config_from_hf(raw, CONFIG)


WRONG_KINDS: list[dict[str, Any]] = [
    {"model_type": ["llama"]},
    {"model_type": {"llama": 1}},
    {"model_type": 7},
    {"hidden_act": ["silu"]},
    {"dtype": 32},
    {"torch_dtype": ["float16"], "dtype": None},
    {"attention_bias": "false"},
    {"mlp_bias": 1},
    {"tie_word_embeddings": "yes"},
    {"rope_scaling": "linear"},
    {"rope_scaling": [2.0]},
    {"rope_scaling": 0},
    {"rope_parameters": {"rope_type": ["yarn"]}},
    {"rope_parameters": {"type": None}},
    {"eos_token_id": "</s>"},
    {"eos_token_id": ["2"]},
    {"eos_token_id": 2.0},
    {"eos_token_id": True},
    {"eos_token_id": -1},
    {"bos_token_id": "1"},
    {"bos_token_id": 96},
    {"eos_token_id": 96},
    {"eos_token_id": [2, 10**30]},
    {"partial_rotary_factor": "half"},
]


def test_a_value_of_the_wrong_kind_is_refused() -> None:
    for changes in WRONG_KINDS:
        with case(changes), raises(CheckpointError, path=CONFIG):
            config_from_hf({**config_keys("llama"), **changes}, CONFIG)


WRONG_WINDOWS: list[dict[str, Any]] = [
    {"sliding_window": 0},
    {"sliding_window": -4},
    {"sliding_window": "4"},
    {"sliding_window": 4.0},
    {"sliding_window": 10**30},
    {"max_window_layers": -1},
    {"max_window_layers": "2"},
    {"use_sliding_window": 1},
    {"layer_types": "full_attention"},
    {"layer_types": [0, 1, 2]},
    {"layer_types": {"a": 1}},
    {"layer_types": ["full_attention"]},
    {"layer_types": ["full_attention", "sliding_attention", "none"]},
    {"layer_types": [["full_attention"]] * 3},
]


def test_windows_that_make_no_sense_are_refused() -> None:
    raw = config_keys("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
    for changes in WRONG_WINDOWS:
        with case(changes), raises(CheckpointError, path=CONFIG):
            config_from_hf({**raw, "layer_types": None, **changes}, CONFIG)


# A type of scaling and what is changed in a sound one.
WRONG_ROPES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 0}),
    ("linear", {"factor": -2.0}),
    ("linear", {"factor": "2"}),
    ("linear", {"factor": True}),
    ("dynamic", {"factor": 1e30}),
    ("dynamic", {"factor": 10**400}),
    ("llama3", {"low_freq_factor": 0}),
    ("llama3", {"low_freq_factor": 5.0}),
    ("llama3", {"high_freq_factor": -4.0}),
    ("llama3", {"original_max_position_embeddings": 0}),
    ("llama3", {"original_max_position_embeddings": 32.0}),
    ("yarn", {"beta_fast": 0}),
    ("yarn", {"beta_fast": -1}),
    ("yarn", {"beta_slow": 32.0}),
    ("yarn", {"beta_slow": 64}),
    ("yarn", {"beta_fast": "fast"}),
    ("yarn", {"attention_factor": 0}),
    ("yarn", {"mscale": -100.0, "mscale_all_dim": 1.0}),
    ("yarn", {"truncate": "no"}),
    ("default", {"rope_theta": 1.0}),
    ("default", {"rope_theta": 0.5}),
]


def test_a_rope_scaling_that_cannot_be_computed_is_refused() -> None:
    for kind, changes in WRONG_ROPES:
        with case(kind, changes), raises(CheckpointError, path=CONFIG):
            config_from_hf({**config_keys("llama"), **_rope(kind, **changes)}, CONFIG)


def test_dynamic_scaling_needs_more_than_one_pair_of_dimensions() -> None:
    with raises(CheckpointError, "head_dim", path=CONFIG):
        config_from_hf({**config_keys("llama"), **_rope("dynamic"), "head_dim": 2}, CONFIG)


WRONG_PARAMS: list[dict[str, Any]] = [
    {"rope_theta": "10000"},
    {"rope_theta": True},
    {"use_scaled_rope": "yes"},
    {"norm_eps": "1e-5"},
    {"use_scaled_rope": True, "rope_scaling_factor": 0},
    {"use_scaled_rope": True, "rope_scaling_factor": "8"},
    {"vocab_size": "96"},
    {"vocab_size": 96.0},
    {"vocab_size": -2},
]


def test_a_value_of_the_wrong_kind_in_params_json_is_refused() -> None:
    for changes in WRONG_PARAMS:
        with case(changes), raises(CheckpointError, path=PARAMS_FILE):
            _from_meta(**changes)


def test_what_published_configs_hold_is_read() -> None:
    raw = {
        **config_keys("llama"),
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-06,
        "attention_bias": None,
        "mlp_bias": None,
        "rope_parameters": None,
        "rope_scaling": {"type": "linear", "factor": 8},
        "max_position_embeddings": 10485760,
        "pad_token_id": -1,
        "eos_token_id": [2, 3],
        "transformers_version": None,
    }
    config = config_from_hf(raw, "config.json")
    assert (config.rope.theta, config.rope.factor, config.output_bias, config.eos_token_ids) == (
        1e6,
        8.0,
        False,
        (2, 3),
    )
    assert (
        _from_meta(rope_theta=500000, multiple_of=256, ffn_dim_multiplier=1.3).max_context == 8192
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"original_max_position_embeddings": 4},
        {"rope_theta": 2.0},
        {"rope_theta": 1.5, "truncate": False},
        {"beta_fast": 1.5, "beta_slow": 1.25, "truncate": False},
        {"original_max_position_embeddings": 2**20},
        {"truncate": None},
    ],
)
def test_odd_yarn_settings_mean_what_they_mean_in_transformers(changes: dict[str, Any]) -> None:
    changes = _rope("yarn", **changes)
    config = config_from_hf(config_keys("llama", **changes), "config.json")
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](transformers_config("llama", **changes), "cpu")
    rotary = Rotary(config)
    torch.testing.assert_close(rotary.whole.inverse_frequencies, expected, rtol=1e-5, atol=0)
    assert rotary(torch.zeros(1)).cosine[0, 0].item() == pytest.approx(scale)


@pytest.mark.parametrize(
    "literal",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "-1e999",
        "[1, [NaN]]",
        "9" * 5000,
        "[" * 100 + "]" * 100,
        "[" * 100000,
    ],
    ids=lambda text: text[:8],
)
@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "a key that is not read"])
def test_numbers_that_are_not_jsons_end_in_one_line(
    key: str, literal: str, folder: Path, tmp_path: Path, capfd: Capture
) -> None:
    model = oracle.copy(folder, tmp_path / "hf")
    raw = json.loads((model / "config.json").read_text())
    text = json.dumps({**raw, key: "@"}).replace('"@"', literal)
    (model / "config.json").write_text(text)
    code, out, err = run(capfd, "inspect", model)
    assert (code, out) == (3, "")
    assert err.startswith(f"quantkit: error: {model / 'config.json'}: ")
    assert err.count("\n") == 1
    assert len(err) < 500


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{\x00}\x00", b'{"model_type": "\xff"}', b"null", b"5", b"[]"]
)
def test_a_config_that_is_no_utf8_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with raises(CheckpointError, path=tmp_path / "config.json"):
        read_settings(tmp_path / "config.json")


def test_what_is_no_small_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with raises(CheckpointError, path=tmp_path / "pipe.json"):
        read_json(tmp_path / "pipe.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**40)
    with raises(CheckpointError, path=tmp_path / "large.json", found=f"{2**40} bytes"):
        read_json(tmp_path / "large.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 200000000},
        {"num_hidden_layers": 1024},
        {"vocab_size": 2**24},
        {"hidden_size": 2**24},
        {"num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16},
    ],
)
def test_absurd_counts_cost_neither_time_nor_memory(
    changes: dict[str, Any], folder: Path, tmp_path: Path, capfd: Capture
) -> None:
    model = oracle.copy(folder, tmp_path / "hf")
    oracle.edit_json(model / "config.json", **changes)
    run(capfd, "inspect", folder)  # what is loaded once
    tracemalloc.start()
    with counted_calls() as calls:
        code, _, err = run(capfd, "inspect", model)
    assert calls[0] < 1_000_000
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()
    assert code == 3, err


@pytest.mark.parametrize(("kind", "context"), [("default", 2**31 - 1), ("dynamic", 2**31 - 1)])
def test_a_long_context_makes_no_large_table(kind: str, context: int) -> None:
    raw = {**config_keys("llama"), **_rope(kind), "max_position_embeddings": context}
    rotary = Rotary(config_from_hf(raw, "config.json"))
    assert rotary(torch.tensor([0, context - 1])).cosine.isfinite().all()


def test_as_many_layers_as_may_be_are_listed_at_once() -> None:
    config = config_from_hf({**config_keys("llama"), "num_hidden_layers": 1024}, "config.json")
    assert len(parameters(config)) == 9 * 1024 + 3
    with pytest.raises(QuantkitError):
        config_from_hf({**config_keys("llama"), "num_hidden_layers": 1025}, "config.json")
