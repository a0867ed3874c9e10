"""How much calibration each effort does, and where this is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
from error_parts import raises

import quantkit
from quantkit.architectures.config import ModelConfig
from quantkit.calibration.effort import EFFORTS, MAX_LENGTH, MIN_LENGTH, SAMPLES
from quantkit.errors import RequestError
from quantkit.formats.detect import open_checkpoint


def _config(tmp_path: Path, family: str = "llama", **sizes: Any) -> ModelConfig:
    return open_checkpoint(
        oracle.save(
            oracle.make(family, num_hidden_layers=1, **sizes), tmp_path / f"{family}{len(sizes)}"
        )
    ).config


@pytest.mark.parametrize("effort", ["quick", "default"])
def test_samples_are_as_long_as_the_widest_linear_needs(effort: str, tmp_path: Path) -> None:
    own = EFFORTS[effort]  # type: ignore[index]
    least = MIN_LENGTH * SAMPLES / own.tokens_per_input
    for times, length in (
        (0.5, MIN_LENGTH),
        (1, MIN_LENGTH),
        (1.5, 2 * MIN_LENGTH),
        (4, 4 * MIN_LENGTH),
    ):
        width = int(least * times)
        config = _config(
            tmp_path / str(times), intermediate_size=width, max_position_embeddings=4096
        )
        assert own.length(config) == length, times
        assert own.length(config) * SAMPLES >= min(
            own.tokens_per_input * width, MIN_LENGTH * SAMPLES
        )
    assert EFFORTS["thorough"].length(config) == MAX_LENGTH


@pytest.mark.slow
def test_no_sample_is_longer_than_the_context_or_the_maximum(tmp_path: Path) -> None:
    short = _config(tmp_path / "short", max_position_embeddings=100)
    wide = _config(tmp_path / "wide", intermediate_size=1 << 17, max_position_embeddings=1 << 14)
    for effort in EFFORTS.values():
        assert effort.length(short) == 100
        assert effort.length(wide) == MAX_LENGTH


def test_experts_need_more_as_each_gets_a_share_of_the_tokens(tmp_path: Path) -> None:
    sizes = {"intermediate_size": 512, "max_position_embeddings": 4096}
    dense = _config(
        tmp_path / "dense", "mixtral", **sizes, num_local_experts=2, num_experts_per_tok=2
    )
    sparse = _config(
        tmp_path / "sparse", "mixtral", **sizes, num_local_experts=8, num_experts_per_tok=1
    )
    assert EFFORTS["default"].length(sparse) == 8 * EFFORTS["default"].length(dense)


@pytest.mark.slow
def test_the_manifest_records_the_effort_and_thorough_is_another_name_for_one(
    demo_model: Path, tmp_path: Path
) -> None:
    def made(name: str, **options: Any) -> tuple[str, str]:
        found = quantkit.quantize(
            demo_model,
            tmp_path / name,
            "int4-g64",
            keep=["model.layers.[123].*"],
            samples=16,
            length=64,
            source_check=False,
            **options,
        ).manifest
        return found["effort"], found["files"]["model.safetensors"]

    default, quick = made("default"), made("quick", effort="quick")
    thorough, alias = made("thorough", effort="thorough"), made("alias", thorough=True)
    assert [effort for effort, _ in (default, quick, thorough)] == ["default", "quick", "thorough"]
    assert thorough == alias
    assert (
        default[1] == quick[1] != thorough[1]
    )  # with as many tokens, only the float stream differs


def test_efforts_that_contradict_or_do_not_exist_are_refused(
    demo_model: Path, tmp_path: Path
) -> None:
    with raises(RequestError, found="best"):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", effort="best")  # type: ignore[arg-type]
    with raises(RequestError, options=["thorough", "effort"]):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", effort="quick", thorough=True)
    with raises(RequestError, options=["effort", "method"]):
        quantkit.quantize(demo_model, tmp_path / "out", "int8", effort="quick")
    quantkit.plan.quantize(
        demo_model, tmp_path / "out", "int4-g64", effort="thorough", thorough=True
    )
