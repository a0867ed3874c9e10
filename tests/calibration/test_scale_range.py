"""Scales that a format stores in float16, of models in other types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit
from quantkit.calibration.group_solver import GroupSolver
from quantkit.errors import NonFiniteError
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.verify import verify
from quantkit.tensors.qtensor import QuantTensor

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"
GPTQ: dict[str, Any] = {"method": "gptq", "samples": 8, "length": 64}  # and the gate has to pass


@pytest.fixture(scope="module")
def sources(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in bfloat16 and float32."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        dtype: quantkit.convert(demo_model, folder / dtype, dtype=dtype).path
        for dtype in ("bf16", "fp32")
    }


def _scaled(source: Path, target: Path, factor: float) -> Path:
    """Multiply one linear and divide the next one by a power of two: the model computes the
    same.
    """
    oracle.copy(source, target)
    (target / "quantkit.json").unlink()
    tensors: dict[str, Tensor] = load_file(target / "model.safetensors")
    tensors[f"{UP}.weight"] *= factor
    tensors[f"{DOWN}.weight"] /= factor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "scheme"),
    [("gguf", "int4-g32"), ("gguf", "q4_k_m"), ("gptq", "int4-g32"), ("awq", "int4-g32")],
)
def test_a_float32_model_is_solved_for_formats_with_float16_scales(
    to: Any, scheme: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    made = quantkit.quantize(sources["fp32"], tmp_path / "out", scheme, to=to, **GPTQ)
    assert verify(made.path).ok
    if to == "gguf":
        kinds = {
            tensor.tensor_type.name for tensor in gguf.GGUFReader(made.path / "model.gguf").tensors
        }
        assert kinds & {"Q4_0", "Q5_0"}


@pytest.mark.slow
def test_several_formats_have_equal_scales_in_their_types(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    made = quantkit.quantize(
        sources["fp32"],
        tmp_path / "out",
        "int4-g32",
        to=["compressed-tensors", "gptq", "mlx"],
        **GPTQ,
    )
    folders = [made.path / name for name in ("compressed-tensors", "gptq", "mlx")]
    weights = [open_checkpoint(folder).load(f"{UP}.weight") for folder in folders]
    assert all(isinstance(weight, QuantTensor) for weight in weights)
    dtypes = [weight.scale.dtype for weight in weights if isinstance(weight, QuantTensor)]
    assert dtypes == [torch.float32, torch.float16, torch.float32]
    assert verify(folders[0], folders[1]).is_same
    assert verify(folders[0], folders[2]).is_same


def _never_solve(*_: object, **__: object) -> Any:
    raise AssertionError("a linear was solved")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "to", "scheme", "factor"),
    [
        ("bf16", "gptq", "int4-g32", 2.0**30),
        ("fp32", "gptq", "int4-g32", 2.0**-30),
        ("bf16", "gguf", "q4_k_m", 2.0**-30),
        ("fp32", "gguf", "q4_k_m", 2.0**30),
    ],
)
def test_scales_out_of_range_are_found_before_solving_and_the_remedies_work(
    dtype: str,
    to: Any,
    scheme: str,
    factor: float,
    sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = _scaled(sources[dtype], tmp_path / "scaled", factor)
    with monkeypatch.context() as patch:
        patch.setattr(GroupSolver, "solve", _never_solve)
        with pytest.raises(NonFiniteError) as caught:
            quantkit.quantize(source, tmp_path / "out", scheme, to=to, **GPTQ)
    assert UP in caught.value.problem or DOWN in caught.value.problem
    hint = str(caught.value.hint)
    assert "`keep=" in hint
    assert '`to="compressed-tensors"`' in hint
    assert ('`scheme="int4-g32"`' in hint) == (scheme == "q4_k_m")  # which no folder has
    quantkit.quantize(source, tmp_path / "kept", scheme, to=to, keep=[UP, DOWN], **GPTQ)
    quantkit.quantize(source, tmp_path / "native", "int4-g32", **GPTQ)


@pytest.mark.slow
def test_small_scales_of_a_float16_model_are_found_before_solving(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = quantkit.convert(demo_model, tmp_path / "half", dtype="fp16").path
    (source / "quantkit.json").unlink()
    tensors: dict[str, Tensor] = load_file(source / "model.safetensors")
    tensors[f"{UP}.weight"] *= 2.0**-16
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(GroupSolver, "solve", _never_solve)
    with pytest.raises(NonFiniteError) as caught:
        quantkit.quantize(source, tmp_path / "out", "q4_k_m", to="gguf", **GPTQ)
    assert UP in caught.value.problem


@pytest.mark.slow
def test_scales_that_bfloat16_rounds_beyond_float16_are_found_in_float16(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source = _scaled(sources["bf16"], tmp_path / "scaled", 2.0**-14)
    made = quantkit.quantize(source, tmp_path / "out", "int4-g32", to="gptq", **GPTQ)
    assert verify(made.path, source).ok


@pytest.mark.slow
def test_bfloat16_models_of_usual_sizes_keep_bfloat16_scales(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """So that one solution serves all formats."""
    made = quantkit.quantize(sources["bf16"], tmp_path / "out", "int4-g32", to="gptq", **GPTQ)
    weight = open_checkpoint(made.path).load(f"{UP}.weight")
    assert isinstance(weight, QuantTensor)
    assert torch.equal(weight.scale, weight.scale.bfloat16().half())
