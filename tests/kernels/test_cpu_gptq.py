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
from quantkit.tensors.code_table import find_table
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.scheme import FLOAT_SCHEMES, Codes, QuantScheme

pytestmark = pytest.mark.cpu_kernels

CPU = torch.device("cpu")
SCHEMES = ("int4-g32", "int4-g32-asym", "int4-g128", "int4-g128-asym", "int4", "int8", "iq4_nl")
TABLES = (Codes.TABLE, Codes.E2M1, Codes.E4M3)
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
    table = find_table(scheme.codes, CPU)
    if table is not None:
        values = table.round(grouped / step)
        return ((values * step - grouped).square() * importance).sum().item()
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
        scheme = any_scheme(name).of_floats
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


def test_groups_of_zeros_have_a_step_of_zero_in_a_table(variant: str) -> None:
    weight = torch.randn(64, 5)
    weight[:32, 1] = 0
    weight[:32, 2] *= 1e20
    importance = torch.ones(64)
    importance[32:] = 0
    arguments = weight, importance, any_scheme("iq4_nl").of_floats, torch.float32
    scale, _ = make_cpu_kernels().search_scales(*arguments)
    torch_scale, _ = search_scales(*arguments)
    assert (scale == 0).nonzero().tolist() == [[0, 1]]
    # Neither squares that overflow nor weights that do not count say which step is better.
    assert torch.equal(scale[0, 2], torch_scale[0, 2])
    assert torch.equal(scale[1], torch_scale[1])


@pytest.mark.parametrize("kind", TABLES)
def test_columns_are_rounded_to_a_table_as_by_torch(variant: str, kind: Codes) -> None:
    table = find_table(kind, CPU)
    assert table is not None
    # The numbers, what is half way between them, and what lies beyond: the codes of columns that
    # do not move each other are the same bit for bit.
    middles = (table.values[1:] + table.values[:-1]) / 2
    far = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1e-42, -1e-42])
    quotients = torch.cat([table.values, middles, torch.randn(500) * table.values[-1], far])
    columns = torch.tensor([1, 0])
    start = torch.stack([quotients, quotients.flip(0)])
    written = []
    for kernels in (TORCH, make_cpu_kernels()):
        codes = torch.zeros_like(start)
        errors = torch.empty_like(start)
        scale = torch.ones(1, len(quotients))
        operands = torch.zeros(2, 2), columns, scale, None, len(table.values), table, 2
        kernels.round_in_turn(start, start, *operands, codes, errors)
        written.append(codes.clone())
        kernels.improve_in_turn(start, torch.tensor([0.5, 0.25]), *operands, codes, errors)
        written.append(codes)
    for position in (0, 1):
        assert torch.equal(written[position], written[position + 2]), position
        assert torch.equal(written[position].signbit(), written[position + 2].signbit()), position
    assert torch.isin(written[0], table.values).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_a_layer_of_small_floats_loses_as_little_as_with_torch(variant: str, name: str) -> None:
    weight, hessian = _problem(37, 256)
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = hessian.diagonal().mean()
    scheme = FLOAT_SCHEMES[name]
    start = quantize_rtn(weight, scheme, torch.bfloat16)
    reports = []
    for kernels in (TORCH, make_cpu_kernels()):
        damped = Damped.of_(hessian.clone())
        _, report = solve(weight, damped, scheme, torch.bfloat16, kernels=kernels, start=start)
        reports.append(report)
    assert reports[1].output_error == pytest.approx(reports[0].output_error, rel=0.01)


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
