"""What is asked for with a size to fit, and what is told of it; what is chosen is in
test_bit_allocation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.base.memory import size_text
from quantkit.errors import RequestError

SAMPLES: dict[str, Any] = {"samples": 8, "length": 64, "source_check": False}


@pytest.fixture(scope="module")
def folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a Hugging Face folder."""
    made = tmp_path_factory.mktemp("folder") / "model"
    quantkit.convert(demo_model, made, to="hf", source_check=False)
    return made


@pytest.mark.parametrize("size", [{"target_bits": 10}, {"max_size": 2_200_000}])
def test_a_format_that_holds_int8_alone_chooses_by_gptq(
    size: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    planned = quantkit.plan.quantize(
        demo_model, tmp_path / "made", to="int-quantized", **size, **SAMPLES
    )
    assert any("chosen for" in kind for kind in planned.layers), planned


@pytest.mark.parametrize("method", [None, "gptq"])
def test_a_size_needs_a_model_that_can_be_calibrated(
    method: Any, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        RequestError, match="a target size requires a model that can be calibrated"
    ) as caught:
        quantkit.quantize(
            folder, tmp_path / "made", target_bits=4.5, method=method, tensors_only=True
        )
    assert caught.value.hint == 'choose a scheme and `method="rtn"` instead'


def test_a_size_does_not_go_with_rounding(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a target size requires GPTQ"):
        quantkit.quantize(demo_model, tmp_path / "made", target_bits=4.5, method="rtn")


@pytest.mark.parametrize(
    ("given", "expected", "hint"),
    [
        ({"target_bits": 4.125, "embedding": "int8"}, None, None),
        (
            {"target_bits": 4.125, "head": "int8"},
            "at least 5.125 ",
            "linears with a fixed scheme count too: lm_head",
        ),
        ({"target_bits": 4, "head": "int8"}, "at least 5.125 ", None),
        (
            {"max_size": 1_400_000},
            "at least 1467072 ",
            'this size is possible with `head="int8"` and `embedding="int8"`, which stay ',
        ),
        (
            {"max_size": 1_400_000, "to": "gptq"},
            "at least ",
            'this size is possible with `head="int8"`, which stays ',
        ),
        ({"max_size": 1_400_000, "head": "int8"}, None, None),
        ({"max_size": 1_000}, "at least 1467072 ", None),
    ],
)
def test_what_counts_is_reported(
    given: dict[str, Any], expected: str | None, hint: str | None, demo_model: Path, tmp_path: Path
) -> None:
    if expected is None:
        assert quantkit.plan.quantize(demo_model, tmp_path / "made", **given, **SAMPLES).layers
        return
    with pytest.raises(RequestError, match="no choice of schemes has this size") as caught:
        quantkit.plan.quantize(demo_model, tmp_path / "made", **given, **SAMPLES)
    assert expected in str(caught.value.expected)
    assert (
        hint is None
        if caught.value.hint is None
        else hint is not None and caught.value.hint.startswith(hint)
    )


@pytest.mark.slow
def test_one_size_is_reported(demo_model: Path, tmp_path: Path) -> None:
    given = {**SAMPLES, "accept_quality_loss": True}
    made = quantkit.quantize(demo_model, tmp_path / "made.gguf", target_bits=6.5, **given)
    size = size_text((tmp_path / "made.gguf").stat().st_size)
    *_, chosen, written, _ = made.lines()
    assert f" {size} of weights" in chosen
    assert f" {size}, " in written
