"""GPTQ's C++ kernels against torch."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from error_parts import raises
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
from quantkit.tensors.scheme import QuantScheme

pytestmark = pytest.mark.cpu_kernels

CPU = torch.device("cpu")
SCHEMES = ("int4-g32", "int4-g32-asym", "int4-g128", "int4-g128-asym", "int4", "int8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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


def _rounding_loss(
    grouped: Tensor, scale: Tensor, zero: Tensor | None, scheme: QuantScheme, importance: Tensor
) -> float:
    """Sum the weighted squares of the errors of rounding.

    Args:
        grouped: the weight, [groups, columns of a group, rows].
        scale, zero: of each group, [groups, rows].
        scheme: what it is rounded to.
        importance: of each column, [groups, columns of a group, 1].
    """
    step = scale.float().unsqueeze(1)
    if zero is None:
        offset = torch.tensor(float(scheme.levels // 2))
    else:
        offset = zero.float().unsqueeze(1)
    codes = (grouped / step).round().add(offset).clamp(0, scheme.levels - 1).sub(offset)
    return ((codes * step - grouped).square() * importance).sum().item()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", SCHEMES)
def test_scales_lose_no_more_than_those_that_torch_finds(variant: str, name: str) -> None:
    for (rows, columns), dtype in itertools.product(SHAPES, DTYPES):
        weight, hessian = _problem(rows, columns)
        case = rows, columns, dtype
        scheme = any_scheme(name)
        transposed = weight.t().contiguous()
        importance = hessian.diagonal().contiguous()
        scale, zero = make_cpu_kernels().search_scales(transposed, importance, scheme, dtype)
        torch_scale, torch_zero = search_scales(transposed, importance, scheme, dtype)
        assert scale.dtype == dtype, case
        assert (zero is None) == (torch_zero is None) == scheme.symmetric, case
        grouped = transposed.view(len(scale), -1, rows)
        group_importance = importance.view(len(scale), -1, 1)
        loss = _rounding_loss(grouped, scale, zero, scheme, group_importance)
        torch_loss = _rounding_loss(grouped, torch_scale, torch_zero, scheme, group_importance)
        # Where a value is half way between two codes, the last bit of a sum decides.
        assert loss == pytest.approx(torch_loss, rel=5e-3), case
        if dtype != torch.float32:
            assert (scale != torch_scale).float().mean() < 1e-2, case


def test_weights_of_zeros_get_a_scale_of_one(variant: str) -> None:
    weight = torch.zeros(64, 5)
    weight[32:, 1] = 1e-42
    for scheme in ("int4-g32", "int4-g32-asym"):
        scale, _ = make_cpu_kernels().search_scales(
            weight, torch.ones(64), any_scheme(scheme), torch.bfloat16
        )
        assert (scale[0] == 1).all()
        assert (scale != 0).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_loses_as_little_as_with_torch(variant: str, name: str) -> None:
    for rows, columns in SHAPES:
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
        _, torch_report = solve(
            weight, Damped.of_(hessian.clone()), any_scheme(name), torch.bfloat16, kernels=TORCH
        )
        # Of one row's scale both signs may lose the same, and all else follows from which is taken.
        assert report.output_error == pytest.approx(
            torch_report.output_error, rel=0.02 if rows > 1 else 1
        ), (rows, columns)
        error = quantized.dequantize() - weight
        output_error = ((error @ hessian) * error).sum().item()
        assert report.error.sum().item() == pytest.approx(output_error, rel=0.01), (rows, columns)


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
    assert "cpu" in record.message


def test_torch_replaces_them_on_a_device_without_triton_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert select_column_kernels(torch.device("meta")) is TORCH
    (message,) = caplog.messages
    assert "meta" in message


def test_unknown_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "sse9")
    select_column_kernels.cache_clear()
    with raises(RequestError, SETTING, found="sse9"):
        select_column_kernels(CPU)


def test_what_the_kernels_would_read_wrongly_is_refused() -> None:
    scheme = any_scheme("int4-g32")
    with pytest.raises(ValueError, match="float32"):
        make_cpu_kernels().search_scales(
            torch.randn(64, 3, dtype=torch.float64), torch.ones(64), scheme, torch.bfloat16
        )
