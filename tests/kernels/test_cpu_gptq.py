"""GPTQ's C++ kernels against torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from instruction_sets import HERE
from schemes import any_scheme
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.kernels import cpu_gptq
from quantkit.kernels.library import SETTING
from quantkit.model import column_kernels as column_kernels_module
from quantkit.model.column_kernels import make_cpu_kernels, select_column_kernels
from quantkit.solver.columns import TORCH
from quantkit.solver.gptq import Damped, solve
from quantkit.solver.grid import search_scales

pytestmark = pytest.mark.cpu_kernels

CPU = torch.device("cpu")
SCHEMES = ("int4-g32", "int4-g32-asym", "int4-g128", "int4-g128-asym", "int4", "int8")
SHAPES = ((64, 384), (37, 256), (1, 128), (530, 128))
"""Rows, which may leave a part of a vector, and columns, more than a kernel takes at once and
fewer.
"""


def _problem(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(2 * columns, columns, generator=generator)
    inputs = (inputs + inputs.roll(1, 1)) * torch.logspace(-1, 1, columns)[
        torch.randperm(columns, generator=generator)
    ]
    inputs[:, [1, columns - 2]] = 0
    return torch.randn(rows, columns, generator=generator), inputs.t() @ inputs


@pytest.fixture(params=HERE)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SETTING, request.param)
    return str(request.param)


@pytest.mark.sampled(39)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_lose_no_more_than_those_that_torch_finds(
    variant: str, name: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight, hessian = _problem(rows, columns)
    scheme, wanted, importance = (
        any_scheme(name),
        weight.t().contiguous(),
        hessian.diagonal().contiguous(),
    )
    found, zero = make_cpu_kernels().search_scales(wanted, importance, scheme, dtype)
    expected, others = search_scales(wanted, importance, scheme, dtype)
    assert found.dtype == dtype
    assert (zero is None) == (others is None) == scheme.symmetric

    def loss(scale: Tensor, zero: Tensor | None) -> Tensor:
        step, grouped = scale.float().unsqueeze(1), wanted.view(len(scale), -1, rows)
        offset = scheme.levels // 2 if zero is None else zero.float().unsqueeze(1)
        codes = (grouped / step).round().add(offset).clamp(0, scheme.levels - 1).sub(offset)
        return ((codes * step - grouped).square() * importance.view(len(scale), -1, 1)).sum(1)

    # Where a value is half way between two codes, the last bit of a sum decides.
    assert loss(found, zero).sum().item() == pytest.approx(
        loss(expected, others).sum().item(), rel=5e-3
    )
    if dtype != torch.float32:
        assert (found != expected).float().mean() < 1e-2


def test_weights_of_zeros_get_a_scale_of_one(variant: str) -> None:
    weight = torch.zeros(64, 5)
    weight[32:, 1] = 1e-42
    for scheme in ("int4-g32", "int4-g32-asym"):
        scale, _ = make_cpu_kernels().search_scales(
            weight, torch.ones(64), any_scheme(scheme), torch.bfloat16
        )
        assert (scale[0] == 1).all()
        assert (scale != 0).all()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_layer_loses_as_little_as_with_torch(
    variant: str, name: str, rows: int, columns: int
) -> None:
    weight, hessian = _problem(rows, columns)
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = hessian.diagonal().mean()  # as the solver takes them
    quantized, report = solve(
        weight,
        Damped.of_(hessian.clone()),
        any_scheme(name),
        torch.bfloat16,
        kernels=make_cpu_kernels(),
    )
    _, other = solve(
        weight, Damped.of_(hessian.clone()), any_scheme(name), torch.bfloat16, kernels=TORCH
    )
    # Of one row's scale both signs may lose the same, and all else follows from which is taken.
    assert report.output_error == pytest.approx(other.output_error, rel=0.02 if rows > 1 else 1)
    error = quantized.dequantize() - weight
    assert report.error.sum().item() == pytest.approx(
        ((error @ hessian) * error).sum().item(), rel=0.01
    )


def test_they_are_tried_before_they_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    select_column_kernels.cache_clear()
    assert select_column_kernels(CPU) is not TORCH
    right = cpu_gptq.improve_in_turn

    def wrong(*given: Any) -> None:
        right(*given)
        given[-2].zero_()

    assert column_kernels_module._describe_mismatch(
        replace(make_cpu_kernels(), improve_in_turn=wrong), CPU
    )


def test_torch_replaces_them_without_a_compiler_and_a_warning_says_so(
    without_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert select_column_kernels(CPU) is TORCH
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(
        "int4 rounding and GPTQ run without kernels on cpu, 2 to 5 times slower; there is"
    )


def test_torch_replaces_them_on_a_device_without_triton_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert select_column_kernels(torch.device("meta")) is TORCH
    assert caplog.messages == [
        "int4 rounding and GPTQ run without kernels on meta, slower; runs on GPUs"
    ]


def test_unknown_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "sse9")
    select_column_kernels.cache_clear()
    with pytest.raises(RequestError, match="unknown CPU kernels"):
        select_column_kernels(CPU)


def test_what_the_kernels_would_read_wrongly_is_refused() -> None:
    scheme = any_scheme("int4-g32")
    with pytest.raises(ValueError, match="float32"):
        make_cpu_kernels().search_scales(
            torch.randn(64, 3, dtype=torch.float64), torch.ones(64), scheme, torch.bfloat16
        )
