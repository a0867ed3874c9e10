"""config.json read and written, held against what transformers makes of the same file."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_cases import GEMMA, ROPES, VARIANTS, config_keys, transformers_config
from transformers import AutoConfig

from quantkit.architectures.config import ExpertsConfig, ModelConfig
from quantkit.architectures.families import config_from_hf, config_to_hf
from quantkit.errors import CheckpointError, UnsupportedError

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


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_of_transformers_means_the_same_to_both(variant: str) -> None:
    kind, changes = VARIANTS[variant]
    theirs = transformers_config(kind, **changes)
    _require_same_meaning(config_from_hf(config_keys(kind, **changes), "config.json"), theirs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_is_read_back_the_same(variant: str) -> None:
    kind, changes = VARIANTS[variant]
    config = config_from_hf(config_keys(kind, **changes), "config.json")
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config))), "config.json") == config


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_reads_our_config_as_the_one_it_came_from(
    variant: str, tmp_path: Path
) -> None:
    kind, changes = VARIANTS[variant]
    original = transformers_config(kind, **changes)
    config = config_from_hf(config_keys(kind, **changes), "config.json")
    theirs = _read_back(config_to_hf(config), tmp_path / "model")
    _require_same_meaning(config, theirs)
    theirs.rope_parameters.pop("type", None)  # what older readers of some families ask for
    for one in (theirs, original):  # of kinds of layers that there are none of, nothing is kept
        unused = {"full_attention", "sliding_attention"} - set(
            getattr(one, "layer_types", None) or []
        )
        one.rope_parameters = {
            kind: reported for kind, reported in one.rope_parameters.items() if kind not in unused
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


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rope_settings_go_to_transformers_and_back(kind: str, rope: str, tmp_path: Path) -> None:
    settings = {**ROPES[rope], "rope_theta": 123456.0}
    raw = config_keys(kind, rope_parameters=dict(settings))
    config = config_from_hf(raw, "config.json")
    assert config_from_hf(config_to_hf(config), "config.json") == config
    theirs = _read_back(config_to_hf(config), tmp_path / "model")
    assert theirs.rope_parameters == settings == raw["rope_parameters"]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_older_rope_keys_mean_the_same_as_newer_ones(
    rope: str, spelling: str, tmp_path: Path
) -> None:
    newer = config_keys("llama", rope_parameters={**ROPES[rope], "rope_theta": 500000.0})
    older = {key: value for key, value in newer.items() if key != "rope_parameters"}
    scaling = {spelling if key == "rope_type" else key: value for key, value in ROPES[rope].items()}
    older.update(rope_theta=500000.0, rope_scaling=None if rope == "default" else scaling)
    config = config_from_hf(older, "config.json")
    assert config == config_from_hf(newer, "config.json")
    _require_same_meaning(config, _read_back(older, tmp_path / "model"))


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
    found = config_from_hf(raw, "config.json").rope.original_context
    assert found == theirs.rope_parameters["original_max_position_embeddings"] == 64


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


@pytest.mark.parametrize(("kind", "key"), OPTIONAL)
def test_an_absent_key_means_what_transformers_takes_it_for(
    kind: str, key: str, tmp_path: Path
) -> None:
    window = (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        if kind[:4] == "qwen"
        else {}
    )
    raw = config_keys(kind, num_key_value_heads=8, **window)
    if key in ("use_sliding_window", "sliding_window", "max_window_layers"):
        raw.pop("layer_types", None)
    del raw[key]
    _require_same_meaning(config_from_hf(raw, "config.json"), _read_back(raw, tmp_path / "model"))


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", ["absent", None])
def test_a_missing_key_is_named_with_its_file(key: str, value: str | None) -> None:
    raw = config_keys("llama")
    if value is None:
        raw[key] = None
    else:
        del raw[key]
    with pytest.raises(CheckpointError, match=rf"^somewhere/config\.json: lacks the key '{key}'"):
        config_from_hf(raw, "somewhere/config.json")


@pytest.mark.parametrize(
    ("kind", "key"), [("mistral", "num_key_value_heads"), ("qwen3", "head_dim")]
)
def test_a_key_whose_default_differs_by_family_must_be_there(kind: str, key: str) -> None:
    raw = config_keys(kind)
    del raw[key]
    with pytest.raises(CheckpointError, match=rf"config\.json: lacks the key '{key}'"):
        config_from_hf(raw, "config.json")


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
    with pytest.raises(
        CheckpointError, match=rf"^x/config\.json: rope scaling lacks the key '{key}'"
    ):
        config_from_hf(raw, "x/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}},
            "unknown setting .*twist",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1.0}},
            "unknown setting .*beta_fast",
        ),
        (
            {"rope_parameters": {"rope_type": "proportional", "factor": 1.0}},
            "rope type .*proportional",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "mrope", "factor": 2.0}},
            "rope type .*mrope",
        ),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}},
            "unknown setting .*mrope_section",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "unknown setting .*full_attention",
        ),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial rotary",
        ),
        (
            {"model_type": "mistral3"},
            "architecture .*found mistral3,",
        ),  # Ministral 3 with its vision tower
        (
            {"model_type": "gemma3"},
            "architecture .*found gemma3,",
        ),  # which sees pictures; its text part alone is read
        ({"hidden_act": "gelu"}, "activation .*gelu"),
        ({"dtype": "float64"}, "dtype .*float64"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^x/config\.json: .*{message}"):
        config_from_hf({**config_keys("llama"), **changes}, "x/config.json")


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        (
            "gemma",
            {"use_bidirectional_attention": True},
            UnsupportedError,
            "bidirectional attention",
        ),
        ("gemma", {"hidden_activation": "gelu"}, UnsupportedError, "activation .*found gelu"),
        ("gemma", {"hidden_act": "silu"}, UnsupportedError, "activation .*found silu"),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            UnsupportedError,
            "bidirectional attention",
        ),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            UnsupportedError,
            "bidirectional attention",
        ),
        (
            "gemma3_text",
            {"sliding_window_pattern": 0},
            CheckpointError,
            "'sliding_window_pattern' is out of range",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            UnsupportedError,
            "rope_parameters has unknown layer types .*factor",
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 8.0}},
                "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            },
            UnsupportedError,
            "rope scaling of sliding-window layers .*dynamic",
        ),
        ("gemma2", {"hidden_activation": "gelu"}, UnsupportedError, "activation .*found gelu"),
        (
            "olmo3",
            {"rope_theta": 10000.0, "rope_parameters": None},
            UnsupportedError,
            "readers disagree on the rotary base",
        ),
        ("gemma2", {"sliding_window": None}, CheckpointError, "sliding_window is not set"),
        (
            "gemma2",
            {"attn_logit_softcapping": 0},
            CheckpointError,
            "'attn_logit_softcapping' is out of range",
        ),
        (
            "gemma2",
            {"query_pre_attn_scalar": 0.5},
            CheckpointError,
            "wrong type for 'query_pre_attn_scalar'",
        ),
    ],
)
def test_a_setting_of_a_family_that_is_not_computed_is_refused(
    kind: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^x/config\.json: .*{message}"):
        config_from_hf({**config_keys(kind), **changes}, "x/config.json")


@pytest.mark.parametrize(
    "key",
    [
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "rope_theta",
    ],
)
@pytest.mark.parametrize("value", ["many", [8.0]])
def test_a_rope_setting_that_is_no_number_is_refused(key: str, value: Any) -> None:
    raw = {
        **config_keys("llama"),
        "rope_parameters": {**ROPES["llama3"], "rope_theta": 10000.0, key: value},
    }
    with pytest.raises(CheckpointError, match=r"^x/config\.json: has a value of the wrong type"):
        config_from_hf(raw, "x/config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 0},
        {"num_attention_heads": [8]},
        {"vocab_size": -1},
        {"num_attention_heads": 8, "num_key_value_heads": 3},
        {"head_dim": 7},
        {"rope_parameters": "linear"},
        {"rope_theta": "big", "rope_parameters": None},
        {"eos_token_id": "</s>"},
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_file(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"^x/config\.json: "):
        config_from_hf({**config_keys("llama"), **changes}, "x/config.json")


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
    found = first.differences(replace(second, experts=ExpertsConfig(8, 64, 2)))
    assert {"rope.type default against yarn", "rope.theta 1000000 against 10000"} < set(found)
    assert any(
        line.startswith("experts none against count 8, size 64, per_token 2, shared_size 0")
        for line in found
    )
    assert "window none against 5 in layer 1 and 1 more" in found
    assert not [line for line in found if "None" in line or "=" in line]
