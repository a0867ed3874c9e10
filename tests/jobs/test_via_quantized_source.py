"""GPTQ of models that are published in FP8, MXFP4 or int4: as of the floats that these mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from quantized_folders import with_mxfp4_experts
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import quantkit

Tiny = Callable[[str], Path]
BLOCK = 32
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
GPTQ: dict[str, Any] = {
    "samples": 16,
    "length": 128,
    "source_check": False,
    "accept_quality_loss": True,
}


def _is_linear(name: str, value: Tensor) -> bool:
    return value.dim() == 2 and ("_proj" in name)


def _fp8(source: Path, target: Path) -> Path:
    """A copy whose linears are in FP8 with a scale for each block, as DeepSeek-V3 and Kimi K2
    are published.
    """
    tensors = load_file(source / "model.safetensors")
    for name in [name for name, value in tensors.items() if _is_linear(name, value)]:
        weight = tensors[name]
        padded = functional.pad(weight, (0, -weight.shape[1] % BLOCK, 0, -weight.shape[0] % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).view_as(padded)[
            : weight.shape[0], : weight.shape[1]
        ]
        tensors |= {name: codes.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scale}
    return _written(source, target, tensors, FP8)


def _mxfp4(source: Path, target: Path) -> Path:
    """A copy whose experts are in MXFP4 of random codes, as gpt-oss is published."""
    tensors = with_mxfp4_experts(load_file(source / "model.safetensors"))
    return _written(source, target, tensors, {"quant_method": "mxfp4"})


def _int4_experts(source: Path, target: Path) -> Path:
    """A copy whose experts alone are int4, without a manifest, as Kimi K2 Thinking is published."""
    recipe = {
        "default": "int4-g32",
        "overrides": [
            {"pattern": "*.self_attn.*", "scheme": "keep"},
            {"pattern": "*.shared_experts.*", "scheme": "keep"},
        ],
    }
    path = target.with_suffix(".json")
    path.write_text(json.dumps(recipe))
    made = quantkit.quantize(
        source,
        target,
        quantkit.Recipe.from_json(path),
        method="rtn",
        source_check=False,
        accept_quality_loss=True,
    )
    for name in ("quantkit.json", "README.md"):
        (made.path / name).unlink(missing_ok=True)
    return made.path


def _written(
    source: Path, target: Path, tensors: dict[str, Tensor], settings: dict[str, Any]
) -> Path:
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.model"):
        (target / name).write_bytes((source / name).read_bytes())
    oracle.edit_json(target / "config.json", quantization_config=settings)
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stored", "dequantize"),
    [
        ("deepseek_v3", _fp8, False),
        ("glm4_moe", _fp8, False),
        ("gpt_oss", _mxfp4, False),
        ("deepseek_v3", _int4_experts, True),
    ],
    ids=["fp8", "fp8 with extra layers", "mxfp4", "int4"],
)
def test_gptq_solves_the_floats_that_codes_mean(
    kind: str,
    stored: Callable[[Path, Path], Path],
    dequantize: bool,
    tiny_model: Tiny,
    tmp_path: Path,
) -> None:
    source = stored(tiny_model(kind), tmp_path / "source")
    floats = quantkit.convert(
        source,
        tmp_path / "floats",
        dequantize=True,
        tensors_only=kind != "gpt_oss",
        source_check=False,
    ).path
    assert "quantization_config" not in json.loads((floats / "config.json").read_text())
    made = quantkit.quantize(source, tmp_path / "int4", "int4-g32", dequantize=dequantize, **GPTQ)
    assert sum(made.schemes.values()) > 14
    expected = quantkit.quantize(floats, tmp_path / "expected", "int4-g32", **GPTQ).path
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (made.path, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for pair in ((made.path, source), (source, made.path)):
        report = quantkit.verify(*pair)
        assert report.ok, report.lines()
