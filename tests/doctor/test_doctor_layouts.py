"""The doctor on quantized modules whose tensors belong to several layouts, or of which a part is
missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken_folders as build
import pytest
import torch
from broken_folders import DOWN, LINEARS, Q, Tensors
from safetensors.torch import load_file, save_file

import quantkit

TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
UNKNOWN = {"model_type": "other"}


def _int8_of_bitsandbytes(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(-1)
    codes = (weight.float() / scale[:, None] * 127).round().char()
    return {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def _torchao(weight: torch.Tensor) -> Tensors:
    scale = weight.float().abs().amax(-1, keepdim=True) / 127
    codes = (weight.float() / scale).round().char()
    return {
        "_weight_qdata": codes,
        "_weight_scale": scale,
        "_weight_zero_point": torch.zeros(len(weight), 1).char(),
    }


def _encoded(encode: Callable[[torch.Tensor], Tensors]) -> Tensors:
    found = build.floats()
    for module in LINEARS:
        found |= {
            f"{module}.{suffix}": one
            for suffix, one in encode(found.pop(f"{module}.weight")).items()
        }
    return found


def _diagnosed(
    folder: Path, found: Tensors, config: dict[str, Any], **requested: Any
) -> set[tuple[str, str]]:
    """The rules that find something in a folder with these tensors, and where."""
    build.write(folder, found, config)
    return {
        (one.rule.name, one.location) for one in quantkit.diagnose(folder, **requested).findings
    }


def _torchao_folder(
    folder: Path, change: Callable[[Tensors], object], **requested: Any
) -> set[tuple[str, str]]:
    found = _encoded(_torchao)
    change(found)
    build.write(folder, found, build.config(TORCHAO))
    header = {
        f"{module}.weight": json.dumps(
            {"_type": "Int8Tensor", "_data": {"block_size": [1, shape[1]]}}
        )
        for module, shape in LINEARS.items()
    }
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", header)
    return {
        (one.rule.name, one.location) for one in quantkit.diagnose(folder, **requested).findings
    }


@pytest.mark.parametrize("changes", [{}, UNKNOWN], ids=["llama", "unknown-family"])
@pytest.mark.parametrize(
    ("form", "suffix", "tensor"),
    [
        ("gptq", "weight_packed", torch.zeros(64, 16, dtype=torch.int32)),
        ("awq", "weight_scale", torch.zeros(64, 2)),
        ("packed", "qweight", torch.zeros(16, 64, dtype=torch.int32)),
        ("packed", "weight", torch.zeros(64, 128, dtype=torch.int8)),
        ("int8", "SCB2", torch.zeros(64)),
        ("fp8", "scales", torch.zeros(64)),
    ],
)
def test_tensors_of_another_layout_in_a_quantized_module(
    form: str, suffix: str, tensor: torch.Tensor, changes: dict[str, str], tmp_path: Path
) -> None:
    config = build.FORMATS[form][1] | changes
    found = _diagnosed(
        tmp_path / "model", {**build.tensors(form), f"{DOWN}.{suffix}": tensor}, config
    )
    known = suffix != "SCB2" or not changes  # of other names only known families tell
    assert found == ({("extra-tensor", f"{DOWN}.{suffix}")} if known else set())


@pytest.mark.parametrize("suffix", ["_scales", "_blocks"])
def test_suffixes_of_mxfp4_after_a_dot(suffix: str, tmp_path: Path) -> None:
    tensors = {**build.tensors("gptq"), f"{DOWN}.{suffix}": torch.zeros(64, 4, dtype=torch.uint8)}
    found = _diagnosed(tmp_path / "model", tensors, build.FORMATS["gptq"][1])
    assert ("extra-tensor", f"{DOWN}.{suffix}") in found


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_int8_of_bitsandbytes_in_a_folder_of_another_method(form: str, tmp_path: Path) -> None:
    found = _diagnosed(tmp_path / "model", _encoded(_int8_of_bitsandbytes), build.FORMATS[form][1])
    assert found == {("other-kind", module) for module in LINEARS}


def test_a_state_of_bitsandbytes_without_codes(tmp_path: Path) -> None:
    """In a family that is not known, no other rule misses the weight."""
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    tensors = {
        **build.floats(),
        f"{DOWN}.weight.quant_state.bitsandbytes__int4": torch.zeros(8, dtype=torch.uint8),
    }
    del tensors[f"{DOWN}.weight"]
    assert ("incomplete", DOWN) in _diagnosed(
        tmp_path / "model", tensors, build.config(settings, **UNKNOWN)
    )


def _experts(folder: Path, config: dict[str, Any]) -> quantkit.Diagnosis:
    """A folder with stacked experts in MXFP4, whose codes lie in a file that is missing."""
    name = "model.layers.0.mlp.experts.down_proj"
    codes, scales = (
        torch.zeros(2, 64, 4, 16, dtype=torch.uint8),
        torch.zeros(2, 64, 4, dtype=torch.uint8),
    )
    build.write(
        folder,
        {**build.floats(), f"{name}_scales": scales, f"{name}_blocks": codes},
        config,
        shards=2,
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[f"{name}_scales"] != index[f"{name}_blocks"]
    (folder / index[f"{name}_blocks"]).unlink()
    return quantkit.diagnose(folder)


def test_codes_in_a_file_that_is_missing(tmp_path: Path) -> None:
    found = {
        one.rule.name
        for one in _experts(tmp_path / "named", build.config({"quant_method": "mxfp4"})).findings
    }
    assert "missing-file" in found
    assert "incomplete" not in found
    assert "not-in-config" in {
        one.rule.name for one in _experts(tmp_path / "unnamed", build.config()).findings
    }


@pytest.mark.parametrize("form", ["packed", "int8", "gptq", "mlx", "fp8"])
def test_scales_without_codes_lack_the_codes_of_the_format(form: str, tmp_path: Path) -> None:
    tensors = build.tensors(form)
    suffix = {"packed": "weight_packed", "gptq": "qweight"}.get(form, "weight")
    build.write(
        tmp_path / "model",
        {n: t for n, t in tensors.items() if n != f"{Q}.{suffix}"},
        build.FORMATS[form][1],
    )
    (found,) = quantkit.diagnose(tmp_path / "model").findings
    assert (found.rule.name, found.location) == ("incomplete", Q)
    assert suffix in found.message


def test_a_sound_folder_of_torchao(tmp_path: Path) -> None:
    assert _torchao_folder(tmp_path / "model", lambda tensors: None, deep=True) == set()


@pytest.mark.parametrize("suffix", ["_weight_qdata", "_weight_scale", "_weight_zero_point"])
@pytest.mark.parametrize(
    "damage", [torch.t, lambda tensor: tensor.to(torch.int16)], ids=["turned", "retyped"]
)
def test_tensors_of_torchao_that_do_not_fit(
    suffix: str, damage: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    name = f"{DOWN}.{suffix}"
    found = _torchao_folder(
        tmp_path / "model", lambda tensors: tensors.update({name: damage(tensors[name])})
    )
    assert ("codes-shape", DOWN) in found


def test_modules_of_torchao_that_lack_tensors_or_are_of_another_method(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[f"{Q}._weight_scale"]
        for suffix in _torchao(torch.ones(1, 1)):
            del tensors[f"{DOWN}.{suffix}"]
        tensors |= {
            f"{DOWN}.{suffix}": one
            for suffix, one in build.gptq(build.floats()[f"{DOWN}.weight"]).items()
        }

    found = _torchao_folder(tmp_path / "model", change)
    assert found == {("incomplete", Q), ("other-kind", DOWN)}


def test_single_values_of_any_type_are_read(tmp_path: Path) -> None:
    tensors = {**build.tensors("fp8"), f"{DOWN}.input_scale": torch.tensor(3, dtype=torch.uint16)}
    _diagnosed(tmp_path / "model", tensors, build.FORMATS["fp8"][1], deep=True)


def test_bits_that_are_null_are_not_the_usual_ones(tmp_path: Path) -> None:
    settings = {**build.AWQ, "bits": None}
    found = _diagnosed(
        tmp_path / "model", build.tensors("awq"), build.config(settings), runtime="vllm"
    )
    assert {("other-scheme", module) for module in LINEARS} <= found
