"""config.json read and written, held against what transformers makes of the same file."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from case_names import case
from config_cases import GEMMA, ROPES, VARIANTS, config_keys, transformers_config
from error_parts import raises
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantkit.architectures.config import ExpertsConfig, ModelConfig
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.errors import CheckpointError, QuantkitError, UnsupportedError
from quantkit.model.rope import inverse_frequencies

CONFIG = Path("x/config.json")
KINDS = ("llama", "mistral", "qwen2", "qwen3")


def _read_back(raw: dict[str, Any], folder: Path) -> Any:
    """The config that transformers makes of a config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoConfig.from_pretrained(folder)


def _require_same_meaning(ours: ModelConfig, theirs: Any) -> None:
    """Hold every field against the attributes that the modelling code of transformers uses."""
    assert ours.architecture == theirs.model_type
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    ropes = theirs.rope_parameters
    for rope, kind in (
        (ours.rope, "full_attention"),
        (ours.window_rope or ours.rope, "sliding_attention"),
    ):
        if kind not in ropes or kind in theirs.layer_types:
            assert rope.theta == ropes.get(kind, ropes)["rope_theta"]
            assert rope.type == ropes.get(kind, ropes)["rope_type"]
            partial = ropes.get(kind, ropes).get("partial_rotary_factor", 1)
            assert (rope.rotary_dim or ours.head_dim) == ours.head_dim * partial
            assert rope.query_scaling_beta == ropes.get(kind, ropes).get("llama_4_scaling_beta")
    assert {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[ours.activation] == _activation(
        theirs
    )
    scale = ours.head_dim**-0.5 if ours.attention_scale is None else ours.attention_scale
    assert scale == getattr(
        theirs,
        "attention_multiplier",
        getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5,
    )
    root = theirs.hidden_size**0.5 if theirs.model_type.startswith("gemma") else 1
    assert ours.embedding_multiplier == getattr(theirs, "embedding_multiplier", root)
    assert ours.residual_multiplier == getattr(theirs, "residual_multiplier", 1)
    assert ours.logit_multiplier == 1 / getattr(theirs, "logits_scaling", 1)
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.qkv_bias == (
        theirs.model_type == "qwen2" or getattr(theirs, "attention_bias", False)
    )
    assert ours.output_bias == (
        getattr(theirs, "attention_bias", False) and theirs.model_type[:3] != "glm"
    )
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.bos_token_id == theirs.bos_token_id
    ends = theirs.eos_token_id
    assert ours.eos_token_ids == (
        () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    )
    assert list(ours.windows) == _windows(theirs)
    rotary = getattr(
        theirs, "no_rope_layers", [1] * theirs.num_hidden_layers
    )  # whose name says the opposite
    assert [layer.rotary for layer in ours.layers] == [bool(rotated) for rotated in rotary]


def _activation(theirs: Any) -> str:
    name: str = getattr(
        theirs, "hidden_activation", theirs.hidden_act if hasattr(theirs, "hidden_act") else ""
    )
    return name


def _windows(theirs: Any) -> list[int | None]:
    count = theirs.num_hidden_layers
    if not hasattr(theirs, "sliding_window"):
        return [None] * count
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * count
    return [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def test_a_config_of_transformers_means_the_same_to_both() -> None:
    for variant, (kind, changes) in VARIANTS.items():
        theirs = transformers_config(kind, **changes)
        with case(variant):
            ours = config_from_hf(config_keys(kind, **changes), "config.json")
            _require_same_meaning(ours, theirs)


def test_what_is_written_is_read_back_the_same() -> None:
    for variant, (kind, changes) in VARIANTS.items():
        config = config_from_hf(config_keys(kind, **changes), "config.json")
        written = json.loads(json.dumps(config_to_hf(config)))
        assert config_from_hf(written, "config.json") == config, variant


def test_transformers_reads_our_config_as_the_one_it_came_from(tmp_path: Path) -> None:
    for variant, (kind, changes) in VARIANTS.items():
        with case(variant):
            _require_read_as_original(kind, changes, tmp_path / variant)


def _require_read_as_original(kind: str, changes: dict[str, Any], folder: Path) -> None:
    original = transformers_config(kind, **changes)
    config = config_from_hf(config_keys(kind, **changes), "config.json")
    theirs = _read_back(config_to_hf(config), folder)
    _require_same_meaning(config, theirs)
    # Older readers of some families look for this key.
    theirs.rope_parameters.pop("type", None)
    # Nothing is kept of kinds of layers that the model has none of.
    for settings in (theirs, original):
        layer_types = getattr(settings, "layer_types", None) or []
        unused = {"full_attention", "sliding_attention"} - set(layer_types)
        settings.rope_parameters = {
            key: value for key, value in settings.rope_parameters.items() if key not in unused
        }
    for key in (
        "rope_parameters",
        "layer_types",
        "attention_bias",
        "mlp_bias",
        "query_pre_attn_scalar",
    ):
        assert getattr(theirs, key, None) == getattr(original, key, None), key
    assert theirs.architectures == [config_to_hf(config)["architectures"][0]]
    assert type(theirs) is type(original)


@pytest.mark.parametrize("kind", ["glm", "glm4"])
def test_null_for_the_part_of_a_head_that_turns_is_all_of_it(kind: str, tmp_path: Path) -> None:
    raw = {
        **config_keys(kind, pad_token_id=0),
        "partial_rotary_factor": None,
        "rope_parameters": None,
    }
    theirs = _read_back(raw, tmp_path / "model")
    assert theirs.rope_parameters.get("partial_rotary_factor") is None
    assert config_from_hf(raw, "config.json").rope.rotary_dim is None


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "olmo3"])
def test_a_model_without_windows_is_written_with_one_that_readers_look_for(kind: str) -> None:
    raw = config_keys(
        kind, pad_token_id=0, head_dim=16, layer_types=["full_attention"] * 3, sliding_window=9
    )
    assert config_to_hf(config_from_hf(raw, "config.json"))["sliding_window"] > 0


def test_rope_settings_go_to_transformers_and_back(tmp_path: Path) -> None:
    for kind, rope in itertools.product(KINDS, ROPES):
        settings = {**ROPES[rope], "rope_theta": 123456.0}
        raw = config_keys(kind, rope_parameters=dict(settings))
        config = config_from_hf(raw, "config.json")
        assert config_from_hf(config_to_hf(config), "config.json") == config, (kind, rope)
        theirs = _read_back(config_to_hf(config), tmp_path / f"{kind}-{rope}")
        assert theirs.rope_parameters == settings == raw["rope_parameters"], (kind, rope)


def test_older_rope_keys_mean_the_same_as_newer_ones(tmp_path: Path) -> None:
    for spelling, rope in itertools.product(("type", "rope_type"), ROPES):
        newer = config_keys("llama", rope_parameters={**ROPES[rope], "rope_theta": 500000.0})
        older = {key: value for key, value in newer.items() if key != "rope_parameters"}
        scaling = dict(ROPES[rope])
        scaling[spelling] = scaling.pop("rope_type")
        older.update(rope_theta=500000.0, rope_scaling=None if rope == "default" else scaling)
        config = config_from_hf(older, "config.json")
        with case(spelling, rope):
            assert config == config_from_hf(newer, "config.json")
            _require_same_meaning(config, _read_back(older, tmp_path / f"{rope}-{spelling}"))


@pytest.mark.parametrize(
    "older",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 700.0, "sliding_window_pattern": 3},
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 700.0},
        {},
    ],
)
def test_gemma3s_older_keys_mean_what_transformers_takes_them_for(
    older: dict[str, Any], tmp_path: Path
) -> None:
    keys = config_keys("gemma3_text", **GEMMA, num_hidden_layers=6)
    raw = {
        key: value for key, value in keys.items() if key not in ("rope_parameters", "layer_types")
    } | older
    config = config_from_hf(raw, "config.json")
    _require_same_meaning(config, _read_back(raw, tmp_path / "model"))
    written = config_to_hf(config)
    assert older.items() <= {**written, "rope_scaling": older.get("rope_scaling")}.items()
    assert (written["rope_scaling"] or {}) == older.get("rope_scaling", {})


@pytest.mark.parametrize("scaling", [None, "yarn", "linear"])
def test_olmo3s_older_scaling_is_for_whole_layers_only(scaling: str | None, tmp_path: Path) -> None:
    raw = {
        key: value
        for key, value in config_keys("olmo3", num_hidden_layers=4).items()
        if key != "rope_parameters"
    }
    raw |= {"rope_theta": 500000, "rope_scaling": scaling and dict(ROPES[scaling])}
    config = config_from_hf(raw, "config.json")
    assert (config.rope.type, config.window_rope and config.window_rope.type) == (
        (scaling, "default") if scaling else ("default", None)
    )
    _require_same_meaning(config, _read_back(raw, tmp_path / "model"))
    written = config_to_hf(config)
    assert (written["rope_theta"], written["rope_scaling"]) == (5e5, raw["rope_scaling"])


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers(tmp_path: Path) -> None:
    raw = {**config_keys("llama"), "rope_theta": 20000.0, "rope_scaling": dict(ROPES["linear"])}
    theirs = _read_back(raw, tmp_path / "model")
    assert theirs.rope_parameters == {**ROPES["linear"], "rope_theta": 20000.0}
    _require_same_meaning(config_from_hf(raw, "config.json"), theirs)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_original_context_is_the_whole_one_where_it_is_not_said(
    kind: str, tmp_path: Path
) -> None:
    scaling = {k: v for k, v in ROPES[kind].items() if k != "original_max_position_embeddings"}
    raw = {**config_keys("llama"), "rope_parameters": {**scaling, "rope_theta": 10000.0}}
    theirs = _read_back(raw, tmp_path / "model")
    original_context = config_from_hf(raw, "config.json").rope.original_context
    assert original_context == theirs.rope_parameters["original_max_position_embeddings"] == 64


OPTIONAL = [
    ("llama", "num_key_value_heads"),
    ("llama", "head_dim"),
    ("llama", "hidden_act"),
    ("llama", "rope_parameters"),
    ("llama", "tie_word_embeddings"),
    ("llama", "attention_bias"),
    ("llama", "mlp_bias"),
    *(("glm", key) for key in ("head_dim", "attention_bias", "rope_parameters")),
    *(("glm4", key) for key in ("head_dim", "attention_bias", "rope_parameters")),
    *(("granite", f"{what}_multiplier") for what in ("embedding", "residual", "attention")),
    *(
        ("granite", key)
        for key in ("num_key_value_heads", "attention_bias", "mlp_bias", "logits_scaling")
    ),
    *(
        ("ministral3", key)
        for key in ("head_dim", "rope_parameters", "sliding_window", "tie_word_embeddings")
    ),
    ("mistral", "head_dim"),
    ("mistral", "sliding_window"),
    *(
        ("phi3", key)
        for key in (
            "num_key_value_heads",
            "rope_parameters",
            "tie_word_embeddings",
            "sliding_window",
        )
    ),
    ("qwen2", "layer_types"),
    ("qwen2", "use_sliding_window"),
    ("qwen2", "sliding_window"),
    ("qwen2", "max_window_layers"),
    ("qwen3", "attention_bias"),
    ("qwen3", "layer_types"),
    ("gemma", "head_dim"),
    ("gemma", "hidden_act"),
    ("gemma", "tie_word_embeddings"),
    ("gemma2", "head_dim"),
    ("gemma2", "hidden_activation"),
    ("gemma2", "tie_word_embeddings"),
    ("gemma2", "attention_bias"),
    ("gemma2", "layer_types"),
    ("gemma2", "sliding_window"),
    ("gemma2", "query_pre_attn_scalar"),
    ("gemma2", "attn_logit_softcapping"),
    ("gemma2", "final_logit_softcapping"),
    ("gemma3_text", "head_dim"),
    ("olmo2", "num_key_value_heads"),
    ("olmo3", "layer_types"),
    ("olmo3", "sliding_window"),
    ("olmo3", "rope_parameters"),
    ("olmo2", "attention_bias"),
    ("olmo2", "tie_word_embeddings"),
    ("gemma3_text", "layer_types"),
    ("gemma3_text", "sliding_window"),
    ("gemma3_text", "query_pre_attn_scalar"),
    ("gemma3_text", "final_logit_softcapping"),
    ("gemma3_text", "rope_parameters"),
]


def test_an_absent_key_means_what_transformers_takes_it_for(tmp_path: Path) -> None:
    for kind, key in OPTIONAL:
        window: dict[str, Any] = {}
        if kind[:4] == "qwen":
            window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        raw = config_keys(kind, num_key_value_heads=8, **window)
        if key in ("use_sliding_window", "sliding_window", "max_window_layers"):
            raw.pop("layer_types", None)
        del raw[key]
        with case(kind, key):
            theirs = _read_back(raw, tmp_path / f"{kind}-{key}")
            _require_same_meaning(config_from_hf(raw, "config.json"), theirs)


REQUIRED = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
]


def test_a_missing_key_is_named_with_its_file() -> None:
    for key in REQUIRED:
        without = config_keys("llama")
        del without[key]
        for raw in (without, without | {key: None}):
            with case(raw), raises(CheckpointError, f"'{key}'", path=CONFIG):
                config_from_hf(raw, CONFIG)


@pytest.mark.parametrize(
    ("kind", "key"), [("mistral", "num_key_value_heads"), ("qwen3", "head_dim")]
)
def test_a_key_whose_default_differs_by_family_must_be_there(kind: str, key: str) -> None:
    raw = config_keys(kind)
    del raw[key]
    with raises(CheckpointError, f"'{key}'", path=CONFIG):
        config_from_hf(raw, CONFIG)


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
    ],
)
def test_a_missing_rope_key_is_named_with_its_file(rope: str, key: str) -> None:
    scaling = {k: v for k, v in ROPES[rope].items() if k != key}
    raw = {**config_keys("llama"), "rope_parameters": {**scaling, "rope_theta": 10000.0}}
    with raises(CheckpointError, f"'{key}'", path=CONFIG):
        config_from_hf(raw, CONFIG)


# What is changed, and what the error names.
NOT_COMPUTED: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}},
        "'twist'",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1.0}},
        "'beta_fast'",
    ),
    (
        {"rope_parameters": {"rope_type": "proportional", "factor": 1.0}},
        "proportional",
    ),
    (
        {"rope_parameters": None, "rope_scaling": {"type": "mrope", "factor": 2.0}},
        "mrope",
    ),
    (
        {"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}},
        "'mrope_section'",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "'full_attention'",
    ),
    ({"partial_rotary_factor": 0.5}, "0.5"),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "0.5",
    ),
    # Ministral 3 with its vision tower.
    ({"model_type": "mistral3"}, "found mistral3,"),
    # It sees pictures; its text part alone is read.
    ({"model_type": "gemma3"}, "found gemma3,"),
    ({"hidden_act": "gelu"}, "found gelu"),
    ({"dtype": "float64"}, "float64"),
]


def test_a_setting_that_is_not_computed_is_refused() -> None:
    for changes, name in NOT_COMPUTED:
        with case(changes), raises(UnsupportedError, name, path=CONFIG):
            config_from_hf({**config_keys("llama"), **changes}, CONFIG)


# A family, what is changed, the type of the error, and what it names.
NOT_COMPUTED_IN_FAMILY: list[tuple[str, dict[str, Any], type[QuantkitError], str]] = [
    (
        "gemma",
        {"use_bidirectional_attention": True},
        UnsupportedError,
        "bidirectional",
    ),
    ("gemma", {"hidden_activation": "gelu"}, UnsupportedError, "found gelu"),
    ("gemma", {"hidden_act": "silu"}, UnsupportedError, "found silu"),
    (
        "gemma2",
        {"use_bidirectional_attention": True},
        UnsupportedError,
        "bidirectional",
    ),
    (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        UnsupportedError,
        "bidirectional",
    ),
    (
        "gemma3_text",
        {"sliding_window_pattern": 0},
        CheckpointError,
        "'sliding_window_pattern'",
    ),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        UnsupportedError,
        "factor",
    ),
    (
        "gemma3_text",
        {
            "rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 8.0}},
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
        UnsupportedError,
        "dynamic",
    ),
    ("gemma2", {"hidden_activation": "gelu"}, UnsupportedError, "found gelu"),
    (
        "olmo3",
        {"rope_theta": 10000.0, "rope_parameters": None},
        UnsupportedError,
        "rope_theta",
    ),
    ("gemma2", {"sliding_window": None}, CheckpointError, "sliding_window"),
    (
        "gemma2",
        {"attn_logit_softcapping": 0},
        CheckpointError,
        "'attn_logit_softcapping'",
    ),
    (
        "gemma2",
        {"query_pre_attn_scalar": 0.5},
        CheckpointError,
        "'query_pre_attn_scalar'",
    ),
]


def test_a_setting_of_a_family_that_is_not_computed_is_refused() -> None:
    for kind, changes, error, name in NOT_COMPUTED_IN_FAMILY:
        with case(kind, changes), raises(error, name, path=CONFIG):
            config_from_hf({**config_keys(kind), **changes}, CONFIG)


def test_a_rope_setting_that_is_no_number_is_refused() -> None:
    sound = {**ROPES["llama3"], "rope_theta": 10000.0}
    for key, value in itertools.product(sound.keys() - {"rope_type"}, ("many", [8.0])):
        raw = {**config_keys("llama"), "rope_parameters": {**sound, key: value}}
        with case(key, value), raises(CheckpointError, key, path=CONFIG):
            config_from_hf(raw, CONFIG)


SENSELESS: list[dict[str, Any]] = [
    {"hidden_size": "wide"},
    {"num_attention_heads": 0},
    {"num_attention_heads": [8]},
    {"vocab_size": -1},
    {"num_attention_heads": 8, "num_key_value_heads": 3},
    {"head_dim": 7},
    {"rope_parameters": "linear"},
    {"rope_theta": "big", "rope_parameters": None},
    {"eos_token_id": "</s>"},
]


def test_a_value_that_makes_no_sense_is_refused_with_its_file() -> None:
    for changes in SENSELESS:
        with case(changes), raises(CheckpointError, path=CONFIG):
            config_from_hf({**config_keys("llama"), **changes}, CONFIG)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_the_float_type_is_read_in_both_spellings(keys: dict[str, Any], expected: str) -> None:
    raw = {
        key: value
        for key, value in config_keys("llama").items()
        if key not in ("dtype", "torch_dtype")
    }
    assert config_from_hf({**raw, **keys}, "config.json").dtype == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_transformers_reads_the_float_type_that_we_write(dtype: str, tmp_path: Path) -> None:
    config = config_from_hf({**config_keys("llama"), "dtype": dtype}, "config.json")
    assert str(_read_back(config_to_hf(config), tmp_path / "model").dtype) == f"torch.{dtype}"


def test_differences_name_each_field_and_both_values() -> None:
    first = config_from_hf(config_keys("llama"), "config.json")
    second = config_from_hf(
        {**config_keys("llama"), "vocab_size": 97, "dtype": "float16"}, "config.json"
    )
    assert first.differences(second) == ["vocab_size 96 against 97"]
    assert first.differences(first.with_dtype("bfloat16")) == []


def test_differences_are_words_not_what_python_calls_its_objects() -> None:
    layers = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    first = config_from_hf(
        {**config_keys("qwen2"), "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "c",
    )
    second = config_from_hf(
        {**config_keys("qwen2", **layers), "rope_parameters": ROPES["yarn"]}, "c"
    )
    differences = first.differences(replace(second, experts=ExpertsConfig(8, 64, 2)))
    assert {"rope.type default against yarn", "rope.theta 1000000 against 10000"} < set(differences)
    assert any(
        line.startswith("experts none against count 8, size 64, per_token 2, shared_size 0")
        for line in differences
    )
    assert [line for line in differences if line.startswith("window none against 5 ")]
    assert not [line for line in differences if "None" in line or "=" in line]


def test_equal_factors_of_llama3_scaling_blend_nothing() -> None:
    """As in Llama 4."""
    settings = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    raw = config_keys("llama") | {"head_dim": 32, "rope_parameters": settings, "rope_scaling": None}
    config = config_from_hf(raw, "config.json")
    theirs = transformers.LlamaConfig(head_dim=32, rope_parameters=settings)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    torch.testing.assert_close(inverse_frequencies(config.rope, 32, 32), expected)
