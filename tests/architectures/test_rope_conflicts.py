"""Rotary settings that a config.json has twice, or where transformers does not look: as
transformers reads them, and never in silence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises

import quantkit
from quantkit.architectures.families import config_from_hf, list_ignored_rope_settings
from quantkit.errors import CheckpointError, UnsupportedError

_YARN = {"rope_type": "yarn", "factor": 4.0}
_LINEAR = {"rope_type": "linear", "factor": 8.0}
_NESTED = {"gemma3_text": {"head_dim": 16, "pad_token_id": 0}, "olmo3": {"pad_token_id": 0}}
_KINDS = ["full_attention", "sliding_attention", "full_attention"]


def _folder(kind: str, folder: Path, changes: dict[str, Any], **sizes: Any) -> Path:
    """A folder of random weights whose config.json has some keys changed; None removes one."""
    own = {**_NESTED.get(kind, {}), "num_hidden_layers": 3, "sliding_window": 5, **sizes}
    oracle.save(oracle.make(kind, **own), folder)
    oracle.edit_json(folder / "config.json", rope_parameters=None, **changes)
    return folder


def _require_same_logits(source: Path, target: Path) -> None:
    """transformers and quantkit agree on a folder, and transformers on what `convert` makes of
    it.
    """
    tokens = oracle.random_tokens(50)
    theirs = oracle.logits(oracle.load(source), tokens)
    with torch.inference_mode():
        own = oracle.ours(source)(tokens, torch.arange(50))
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
    quantkit.convert(source, target)
    torch.testing.assert_close(
        oracle.logits(oracle.load(target), tokens), theirs, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", _NESTED)
@pytest.mark.parametrize("kept", ["linear", "yarn", "longrope"])
def test_an_old_key_of_a_rope_type_that_transformers_5_ignores_is_refused(
    kind: str, kept: str, tmp_path: Path
) -> None:
    source = _folder(
        kind,
        tmp_path / "source",
        {"rope_scaling": {"type": kept, "factor": 8.0}},
        layer_types=_KINDS,
    )
    with raises(UnsupportedError, "'type'", path=source / "config.json", expected="'rope_type'"):
        quantkit.convert(source, tmp_path / "target")
    oracle.edit_json(source / "config.json", rope_scaling={"type": "default"})
    _require_same_logits(source, tmp_path / "target")


@pytest.mark.parametrize("kind", _NESTED)
def test_an_original_context_next_to_settings_by_layer_is_ignored_and_reported(
    kind: str, tmp_path: Path, capfd: Capture
) -> None:
    ropes = {
        "full_attention": {**_YARN, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default"},
    }
    source = _folder(
        kind, tmp_path / "source", {"original_max_position_embeddings": 8}, layer_types=_KINDS
    )
    oracle.edit_json(source / "config.json", rope_parameters=ropes)
    _require_same_logits(source, tmp_path / "target")
    code, _, err = run(capfd, "convert", source, tmp_path / "again")
    assert code == 0
    assert "original_max_position_embeddings 8 " in err


@pytest.mark.parametrize("kind", _NESTED)
@pytest.mark.parametrize("value", [False, None])
def test_truncate_by_kind_of_layer_is_refused(kind: str, value: Any) -> None:
    raw = {
        **oracle.SIZES,
        **_NESTED[kind],
        "model_type": kind,
        "rms_norm_eps": 1e-5,
        "layer_types": _KINDS,
    }
    full = {**_YARN, "rope_theta": 5e5, "truncate": value}
    with raises(UnsupportedError, "'truncate'", path=Path("config.json"), found=value):
        config_from_hf({**raw, "rope_parameters": {"full_attention": full}}, "config.json")
    kept = config_from_hf(
        {**raw, "rope_parameters": {"full_attention": {**full, "truncate": True}}}, "config.json"
    )
    assert kept.rope.truncate


def test_scaling_over_settings_by_layer_that_lack_it_is_refused() -> None:
    """transformers ends in a KeyError there."""
    raw = {
        **oracle.SIZES,
        **_NESTED["gemma3_text"],
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-5,
    }
    ropes = {
        "rope_parameters": {"sliding_attention": {"rope_type": "default"}},
        "rope_scaling": _LINEAR,
        "layer_types": _KINDS,
        "num_hidden_layers": 3,
    }
    with raises(CheckpointError, "'full_attention'", path=Path("config.json")):
        config_from_hf({**raw, **ropes}, "config.json")


@pytest.mark.parametrize("kind", _NESTED)
@pytest.mark.parametrize("scaling", ["linear", "dynamic", "longrope", "yarn"])
@pytest.mark.parametrize("layers", ["full_attention", "sliding_attention"])
def test_models_with_one_kind_of_layer_convert(
    kind: str, scaling: str, layers: str, tmp_path: Path
) -> None:
    """The settings of the kind that no layer has must not stop the reading of what was written."""
    rope: dict[str, Any] = {"rope_type": scaling, "factor": 4.0, "rope_theta": 1e4}
    if scaling == "longrope":
        pairs = 8 if kind == "gemma3_text" else 4
        rope |= {"short_factor": [1.1] * pairs, "long_factor": [3.0] * pairs}
    if scaling in ("longrope", "yarn"):
        rope["original_max_position_embeddings"] = 20
    source = _folder(kind, tmp_path / "source", {}, layer_types=[layers] * 3)
    other = {"full_attention", "sliding_attention"} - {layers}
    ropes = {layers: rope, other.pop(): {"rope_type": "default", "rope_theta": 300.0}}
    oracle.edit_json(source / "config.json", rope_parameters=ropes)
    _require_same_logits(source, tmp_path / "target")


@pytest.mark.parametrize("kind", ["gpt_oss", "ministral3"])
def test_empty_scaling_is_none(kind: str, tmp_path: Path) -> None:
    """Families with rotary settings of their own take these, as transformers does."""
    source = oracle.save(oracle.make(kind, head_dim=16, pad_token_id=0), tmp_path / "source")
    oracle.edit_json(source / "config.json", rope_parameters=None, rope_scaling={})
    _require_same_logits(source, tmp_path / "target")


_FLAT = {"rope_type": "default", "rope_theta": 5e5}


# Settings, and for each that is ignored: the setting with its value, and what wins over it.
_IGNORED: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    (
        {"rope_theta": 1e4, "rope_parameters": _FLAT},
        [("rope_theta 10000.0", "rope_parameters.rope_theta")],
    ),
    ({"rope_theta": 500000, "rope_parameters": _FLAT}, []),
    ({"rope_theta": 1e4, "rope_scaling": _LINEAR}, []),
    (
        {"rope_scaling": {**_LINEAR, "type": "yarn"}},
        [("rope_scaling.type 'yarn'", "rope_scaling.rope_type")],
    ),
    (
        {
            "rope_scaling": {**_YARN, "original_max_position_embeddings": 16},
            "original_max_position_embeddings": 32,
        },
        [("rope_scaling.original_max_position_embeddings 16", " 32")],
    ),
    (
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**_FLAT, "partial_rotary_factor": 0.25},
        },
        [("partial_rotary_factor 0.5", "rope_parameters.partial_rotary_factor is 0.25")],
    ),
    (
        {"rope_theta": 1e4, "rope_scaling": _LINEAR, "rope_parameters": _FLAT},
        [
            ("rope_parameters.rope_type 'default'", "'linear'"),
            ("rope_parameters.rope_theta 500000.0", "10000.0"),
        ],
    ),
    (
        {
            "rope_theta": 5e5,
            "rope_scaling": _LINEAR,
            "rope_parameters": {**_LINEAR, "rope_theta": 5e5},
        },
        [],
    ),
    (
        {
            "rope_scaling": {"type": "linear", "factor": 8.0},
            "rope_parameters": _YARN | {"beta_fast": 4},
        },
        [
            ("rope_parameters.rope_type 'yarn'", "'linear'"),
            ("rope_parameters.factor 4.0", "8.0"),
            ("rope_parameters.beta_fast 4", "rope_scaling"),
        ],
    ),
    (
        {
            "rope_theta": 1e4,
            "rope_local_base_freq": 300.0,
            "rope_parameters": {
                "full_attention": _FLAT,
                "sliding_attention": {"rope_theta": 1e4},
            },
        },
        [
            ("rope_theta 10000.0", "full_attention.rope_theta is 500000.0"),
            (
                "rope_local_base_freq 300.0",
                "rope_parameters.sliding_attention.rope_theta is 10000.0",
            ),
        ],
    ),
    (
        {
            "model_type": "olmo3",
            "rope_scaling": _YARN,
            "original_max_position_embeddings": 8,
            "max_position_embeddings": 64,
        },
        [("original_max_position_embeddings 8", "max_position_embeddings is 64")],
    ),
    (
        {"rope_parameters": {"full_attention": _YARN}, "rope_scaling": {"factor": 2.0}},
        [("rope_parameters.full_attention.factor 4.0", "2.0")],
    ),
    ({"rope_theta": "x", "rope_parameters": 5, "rope_scaling": [1]}, []),
    ({}, []),
]


def test_settings_that_transformers_ignores_are_named() -> None:
    for raw, expected in _IGNORED:
        lines = list_ignored_rope_settings(raw)
        assert len(lines) == len(expected), (raw, lines)
        for line, (ignored, winner) in zip(lines, expected, strict=True):
            assert line.startswith(f"{ignored} "), raw
            assert winner in line.removeprefix(ignored), raw


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "olmo3", "phi3", "gpt_oss"])
def test_what_quantkit_and_transformers_write_contradicts_nothing(
    kind: str, tmp_path: Path
) -> None:
    source = oracle.save(
        oracle.make(kind, **_NESTED.get(kind, {"pad_token_id": 0})), tmp_path / "source"
    )
    quantkit.convert(source, tmp_path / "target")
    for folder in (source, tmp_path / "target"):
        assert list_ignored_rope_settings(json.loads((folder / "config.json").read_text())) == []


def test_a_base_that_is_ignored_is_reported_by_every_job(tmp_path: Path, capfd: Capture) -> None:
    source = _folder("llama", tmp_path / "source", {"rope_theta": 1e4})
    oracle.edit_json(source / "config.json", rope_parameters=_FLAT)
    line = "rope_theta 10000.0 is ignored: rope_parameters.rope_theta is 500000.0"
    for command in (
        ("inspect", source),
        ("convert", source, tmp_path / "bf16"),
        ("doctor", source),
        ("quantize", source, tmp_path / "int8", "--scheme", "int8", "--accept-quality-loss"),
    ):
        code, out, err = run(capfd, *command)
        assert (code, line in out + err) == (0, True), (command, out, err)
    _require_same_logits(source, tmp_path / "target")
