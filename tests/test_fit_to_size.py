"""What is asked for with a size to fit, and what is told of it; what is chosen is in test_bit_allocation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.errors import RequestError

SAMPLES: dict[str, Any] = {"samples": 8, "length": 64, "source_check": False}


@pytest.fixture(scope="module")
def folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a Hugging Face folder."""
    made = tmp_path_factory.mktemp("folder") / "model"
    quantkit.convert(demo_model, made, to="hf", source_check=False)
    return made


@pytest.mark.parametrize("size", [{"target_bits": 10}, {"max_size": 2_200_000}])
def test_a_format_that_holds_int8_alone_chooses_by_gptq(size: dict[str, Any], demo_model: Path, tmp_path: Path) -> None:
    planned = quantkit.plan.quantize(demo_model, tmp_path / "made", to="int-quantized", **size, **SAMPLES)
    assert any("chosen for" in kind for kind in planned.layers), planned


@pytest.mark.parametrize("method", [None, "gptq"])
def test_a_size_needs_a_model_that_can_be_calibrated(method: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a size to fit needs a model that can be calibrated") as caught:
        quantkit.quantize(folder, tmp_path / "made", target_bits=4.5, method=method, tensors_only=True)
    assert caught.value.hint == 'give a scheme and `method="rtn"` instead'


def test_a_size_does_not_go_with_rounding(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a size to fit goes with GPTQ"):
        quantkit.quantize(demo_model, tmp_path / "made", target_bits=4.5, method="rtn")
