"""AutoRound's own settings say what GPTQ's and AWQ's do, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises

import quantkit
from quantkit.base.json_values import Settings
from quantkit.errors import UnsupportedError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.codecs.gptq import AutoRound
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.registry import METHODS
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.scheme import QuantScheme

_PLAIN = {
    "quant_method": "auto-round",
    "bits": 4,
    "data_type": "int",
    "group_size": 32,
    "sym": True,
    "iters": 200,
}
_GPTQ = {**_PLAIN, "packing_format": "auto_round:auto_gptq"}
_AWQ = {**_PLAIN, "packing_format": "auto_round:auto_awq"}


def _stated(values: dict[str, Any]) -> Settings:
    return Settings(values, Path("config.json"), "quantization_config")


@pytest.mark.parametrize(
    ("packing", "to", "scheme"),
    [
        ("auto_round:auto_gptq", "gptq", "int4-g32"),
        ("auto_round:gptqmodel", "gptq", "int4-g32-asym"),
        ("auto_round:auto_awq", "awq", "int4-g32-asym"),
    ],
)
def test_weights_are_those_of_the_layout(
    packing: str, to: str, scheme: str, tmp_path: Path
) -> None:
    source = oracle.save(oracle.make("llama"), tmp_path / "source")
    quantkit.quantize(source, tmp_path / "ours", scheme=scheme, method="rtn", to=to)
    oracle.copy(tmp_path / "ours", tmp_path / "theirs")
    (tmp_path / "theirs" / "quantkit.json").unlink()
    settings = {**_PLAIN, "packing_format": packing, "sym": "asym" not in scheme}
    oracle.edit_json(tmp_path / "theirs" / "config.json", quantization_config=settings)
    ours, theirs = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "theirs")
    assert schemes(ours) == schemes(theirs)
    for module in schemes(ours):
        one, other = ours.load(f"{module}.weight"), theirs.load(f"{module}.weight")
        assert isinstance(one, QuantTensor)
        assert isinstance(other, QuantTensor)
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.dequantize(), other.dequantize())
    quantkit.convert(tmp_path / "theirs", tmp_path / "again")
    written = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "again")
    ]
    assert written[0]["quantization_config"] == written[1]["quantization_config"]


def test_modules_of_other_schemes_are_named_or_match() -> None:
    extra = {
        r".*mlp\.up.*": {"bits": 8, "group_size": -1, "data_type": "int"},
        "model.layers.1.mlp.up_proj": {"bits": 4},
        "model.layers.0.mlp.gate_proj": {"bits": 16, "data_type": "fp"},
        "lm_head": {"bits": 8, "act_bits": 16},
    }
    _, plain = AutoRound().resolve(_stated({**_GPTQ, "extra_config": extra}))
    modules = [
        "lm_head",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.0.mlp.gate_proj",
    ]
    found = METHODS["gptq"].read_settings(plain, modules, ())
    expected = {
        modules[0]: QuantScheme(8, 32),
        modules[1]: QuantScheme(8, None),
        modules[2]: QuantScheme(4, 32),
    }
    assert {module: codec.scheme for module, codec in found.items()} == expected


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({**_PLAIN, "packing_format": "auto_round:llm_compressor"}, "'auto_round:llm_compressor'"),
        ({**_PLAIN, "packing_format": "auto_round:fp8"}, "'auto_round:fp8'"),
        ({**_GPTQ, "data_type": "mx_fp"}, "'mx_fp'"),
        ({**_GPTQ, "act_bits": 8}, "8 bits"),
        ({**_GPTQ, "rotation_config": {"block_size": 32}}, "rotated"),
        (
            {**_AWQ, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8}}},
            "'model.layers.0.mlp.up_proj'",
        ),
        ({**_AWQ, "bits": 8}, "found 8"),
    ],
    ids=["llm_compressor", "fp8", "mx", "activations", "rotated", "awq-mixed", "awq-8"],
)
def test_what_is_not_read_is_named(settings: dict[str, Any], name: str) -> None:
    with raises(UnsupportedError, name, path=Path("config.json")):
        METHODS["awq" if settings["packing_format"].endswith("awq") else "gptq"].read_settings(
            AutoRound().resolve(_stated(settings))[1], ["model.layers.0.mlp.up_proj"], ()
        )
