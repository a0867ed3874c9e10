"""Small floats of 4 bits on searched scales and by GPTQ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.solver.columns import TORCH
from quantkit.solver.gptq import Damped, solve
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.qtensor import QuantTensor, Solver, quantize_rtn
from quantkit.tensors.scheme import FLOAT_SCHEMES, NVFP4

FP4 = ("mxfp4", "nvfp4")


def searched(weight: Tensor, name: str, importance: Tensor | None = None) -> QuantTensor:
    found, solver = round_to_nearest(
        weight, FLOAT_SCHEMES[name], torch.float32, lambda _: TORCH, importance
    )
    assert solver == (Solver.SEARCHED if importance is None else Solver.WEIGHTED)
    return found


def group_errors(value: QuantTensor, weight: Tensor, importance: Tensor) -> Tensor:
    weighted = (value.dequantize() - weight.float()).square() * importance
    return weighted.view(*value.scale.shape, -1).sum(-1)


@pytest.mark.parametrize("name", FP4)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_group_has_a_larger_error_than_on_scales_that_span_it(name: str, weighted: bool) -> None:
    weight = (torch.randn(70, 384) * torch.randn(70, 384).exp()).bfloat16()
    importance = torch.rand(384) + 0.1 if weighted else torch.ones(384)
    found = group_errors(
        searched(weight, name, importance if weighted else None), weight, importance
    )
    spanning = group_errors(
        quantize_rtn(weight, FLOAT_SCHEMES[name], torch.float32), weight, importance
    )
    assert (found <= spanning * (1 + 1e-5)).all()
    assert found.sum() < 0.95 * spanning.sum()


@pytest.mark.parametrize("name", FP4)
def test_outliers_and_zeros_stay_finite(name: str) -> None:
    weight = torch.randn(8, 64)
    weight[1], weight[2], weight[3, 5] = 0, 1e-42, 3e38
    found = searched(weight, name).dequantize()
    assert found.isfinite().all()
    assert not found[1].any()


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_with_equal_inputs_gptq_is_rounding(name: str) -> None:
    weight = torch.randn(40, 256)
    start, _ = round_to_nearest(weight, FLOAT_SCHEMES[name], torch.float32, lambda _: TORCH)
    found, _ = solve(weight, Damped.of_(torch.eye(256)), start.scheme, torch.float32, start=start)
    errors = [(one.dequantize() - weight).abs() for one in (found, start)]  # ties may go either way
    torch.testing.assert_close(*errors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FLOAT_SCHEMES)
def test_gptq_reports_its_output_error_and_lessens_it(name: str) -> None:
    weight = torch.randn(48, 256)
    inputs = torch.randn(600, 256) @ torch.randn(256, 256) / 16
    start, _ = round_to_nearest(weight, FLOAT_SCHEMES[name], torch.float32, lambda _: TORCH)
    found, report = solve(
        weight, Damped.of_(inputs.t() @ inputs), start.scheme, torch.float32, start=start
    )
    assert torch.equal(found.scale, start.scale)
    errors = [
        (inputs.double() @ (one.dequantize() - weight).double().t()).square().sum(0)
        for one in (found, start)
    ]
    assert errors[0].sum() < 0.6 * errors[1].sum()
    torch.testing.assert_close(report.error, errors[0], rtol=1e-3, atol=1e-3)


def test_an_outer_scale_can_be_shared() -> None:
    weight, outer = torch.randn(4, 32), torch.tensor([1000.0])
    found, _ = round_to_nearest(weight, NVFP4, torch.float32, lambda _: TORCH, outer=outer)
    assert found.outer is not None
    assert torch.equal(found.outer, outer.expand(4, 1))
    assert quantize_rtn(weight, NVFP4, torch.float32, outer).outer is not None
