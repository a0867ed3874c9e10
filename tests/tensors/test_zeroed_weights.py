"""Weights of which a coarser type leaves nothing: refused, whatever rounding to that type would
do.
"""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from error_parts import raises
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import NonFiniteError, QualityError
from quantkit.formats.detect import open_checkpoint

_UP = "model.layers.1.mlp.up_proj.weight"
_TINY = 2.0**-26  # of weights around 0.3: float16 has none of their scales


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16 with one weight that is tiny, and not zero."""
    folder = oracle.save(
        oracle.make("llama").bfloat16(), tmp_path_factory.mktemp("tiny") / "source"
    )
    tensors = load_file(folder / "model.safetensors")
    tensors[_UP] *= _TINY
    assert tensors[_UP].all()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_codes_whose_scales_are_zero_are_refused(to: str, source: Path, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    with raises(QualityError, "up_proj'", " 0.9", path=quantized):
        quantkit.quantize(source, quantized, "int4-g32", to=to, method="rtn")
    assert not quantized.exists()


@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_requantizing_does_not_make_zeros(to: str, source: Path, tmp_path: Path) -> None:
    quantkit.quantize(source, tmp_path / "codes", "int4-g32", method="rtn")
    with raises(QualityError, "up_proj'", path=tmp_path / "made"):
        quantkit.convert(tmp_path / "codes", tmp_path / "made", to=to, requantize=True)
    assert not (tmp_path / "made").exists()


def test_verify_calls_a_zeroed_weight_different(source: Path, tmp_path: Path) -> None:
    quantkit.quantize(
        source, tmp_path / "made", "int4-g32", to="gptq", method="rtn", accept_quality_loss=True
    )
    assert not open_checkpoint(tmp_path / "made").load(_UP).dequantize().any()
    report = quantkit.verify(tmp_path / "made", source)
    assert not report.ok
    assert any(_UP in line for line in report.lines())


def test_a_cast_that_leaves_only_zeros_is_refused(source: Path, tmp_path: Path) -> None:
    with raises(NonFiniteError, "up_proj.weight'", "float16", path=source):
        quantkit.convert(source, tmp_path / "made", dtype="fp16")
    quantkit.convert(source, tmp_path / "made", dtype="fp16", allow_nonfinite=True, resume=True)
    assert not load_file(tmp_path / "made" / "model.safetensors")[_UP].any()


def test_weights_that_are_zero_stay_so(source: Path, tmp_path: Path) -> None:
    folder = oracle.copy(source, tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, _UP: torch.zeros_like(tensors[_UP])},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    quantkit.quantize(
        folder, tmp_path / "codes", "int4-g32", to="gptq", method="rtn", accept_quality_loss=True
    )
    quantkit.convert(folder, tmp_path / "floats", dtype="fp16")
    assert not load_file(tmp_path / "floats" / "model.safetensors")[_UP].any()
