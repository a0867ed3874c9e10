"""The GPTQ solver against plain and slow computations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.errors import NonFiniteError
from quantkit.qtensor import quantize_rtn
from quantkit.scheme import QuantScheme
from quantkit.solver.gptq import Grid, descend, gptq, refit_scales, solve_codes
from quantkit.solver.grid import search_scales

ROWS, COLUMNS, GROUP = 12, 96, 32
SCHEMES = ["int4-g32", "int4-g32-asym", "int4", "int8"]


def _problem(dtype: torch.dtype = torch.float32, samples: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, inputs whose columns are correlated and of very different size, and their Hessian."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, COLUMNS, generator=generator) @ torch.randn(COLUMNS, COLUMNS, generator=generator)
    inputs = (inputs * torch.logspace(-1, 1, COLUMNS)[torch.randperm(COLUMNS, generator=generator)]).to(dtype)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    return weight, inputs, inputs.t() @ inputs


def _grid(weight: Tensor) -> Grid:
    scale = (weight.view(ROWS, -1, GROUP).abs().amax(-1) / 7.5).repeat_interleave(GROUP, dim=1)
    return Grid(scale, torch.full_like(scale, 8), 15)


def _loss(weight: Tensor, codes: Tensor, grid: Grid, hessian: Tensor) -> float:
    error = weight - codes * grid.scale
    return ((error @ hessian) * error).sum().item()


def _damped(hessian: Tensor) -> Tensor:
    return hessian + 0.01 * hessian.diagonal().mean() * torch.eye(COLUMNS, dtype=hessian.dtype)


def _slow(weight: Tensor, hessian: Tensor, grid: Grid, order: list[int]) -> Tensor:
    """One column at a time, the inverse of the columns left taken anew at each."""
    rest = weight.clone()
    codes = torch.zeros_like(weight)
    left = list(order)
    while left:
        inverse = torch.linalg.inv(hessian[left][:, left])
        column = left[0]
        codes[:, column] = grid.round(rest[:, column], column)
        error = (rest[:, column] - codes[:, column] * grid.scale[:, column]) / inverse[0, 0]
        rest[:, left] -= error.unsqueeze(1) * inverse[0]
        left = left[1:]
    return codes


def test_codes_equal_those_of_the_slow_computation() -> None:
    weight, _, hessian = _problem(torch.float64)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    grid = _grid(weight)
    found = solve_codes(weight, _damped(hessian), grid, order)
    assert torch.equal(found, _slow(weight, _damped(hessian), grid, order.tolist()))
    assert not torch.equal(found, grid.round(weight, slice(None)))


@pytest.mark.parametrize("block", [1, 7, 32, 96, 1000])
def test_the_block_size_changes_nothing(block: int) -> None:
    weight, _, hessian = _problem(torch.float64)
    order = torch.arange(COLUMNS)
    expected = solve_codes(weight, _damped(hessian), _grid(weight), order)
    assert torch.equal(solve_codes(weight, _damped(hessian), _grid(weight), order, block=block), expected)


def test_uncorrelated_inputs_make_it_round_to_nearest() -> None:
    weight, _, _ = _problem()
    grid = _grid(weight)
    found = solve_codes(weight, torch.eye(COLUMNS), grid, torch.randperm(COLUMNS))
    assert torch.equal(found, grid.round(weight, slice(None)))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_error_is_well_below_that_of_rounding(scheme: str, dtype: torch.dtype) -> None:
    weight, inputs, hessian = _problem()
    parsed = QuantScheme.parse(scheme)
    quantized, report = gptq(weight, hessian, parsed, dtype)
    outputs = inputs @ weight.t()

    def error(dequantized: Tensor) -> float:
        return ((inputs @ dequantized.t() - outputs).norm() / outputs.norm()).item()

    assert quantized.scale.dtype == dtype
    assert report.output_error == pytest.approx(error(quantized.dequantize()), rel=0.02)
    assert report.output_error < 0.7 * error(quantize_rtn(weight, parsed, dtype).dequantize())


def test_refitted_scales_and_descent_lower_the_loss() -> None:
    weight, _, hessian = _problem()
    hessian = _damped(hessian)
    grid = _grid(weight)
    order = torch.argsort(hessian.diagonal(), descending=True)
    codes = solve_codes(weight, hessian, grid, order)
    first = _loss(weight, codes, grid, hessian)
    scale = refit_scales(weight, codes, hessian, grid.scale[:, ::GROUP].contiguous())
    refitted = Grid(scale.repeat_interleave(GROUP, dim=1), grid.zero, grid.top)
    second = _loss(weight, codes, refitted, hessian)
    moved = descend(weight, codes, hessian, refitted, order)
    third = _loss(weight, moved, refitted, hessian)
    assert first > second > third


def test_refitted_scales_are_those_of_least_squares() -> None:
    weight, inputs, hessian = _problem(samples=2000)
    grid = _grid(weight)
    codes = grid.round(weight, slice(None))
    found = refit_scales(weight, codes, hessian, grid.scale[:, ::GROUP].contiguous())
    columns = (inputs.unsqueeze(1) * codes.unsqueeze(0)).view(len(inputs), ROWS, -1, GROUP).sum(-1)
    outputs = inputs @ weight.t()
    for row in range(ROWS):
        expected = torch.linalg.lstsq(columns[:, row], outputs[:, row : row + 1]).solution[:, 0]
        torch.testing.assert_close(found[row], expected, rtol=1e-3, atol=1e-4)


def test_drift_of_the_inputs_is_made_up_for() -> None:
    weight, inputs, hessian = _problem()
    generator = torch.Generator().manual_seed(5)
    seen = inputs @ (torch.eye(COLUMNS) + 0.05 * torch.randn(COLUMNS, COLUMNS, generator=generator))
    hessian, drift = seen.t() @ seen, (inputs - seen).t() @ seen
    wanted = inputs @ weight.t()
    scheme = QuantScheme.parse("int4-g32")

    def error(**options: Tensor) -> float:
        quantized, _ = gptq(weight, hessian, scheme, torch.float32, **options)
        return (seen @ quantized.dequantize().t() - wanted).norm().item()

    assert error(drift=drift) < 0.5 * error()


def test_inputs_are_not_changed() -> None:
    weight, _, hessian = _problem()
    before = weight.clone(), hessian.clone()
    gptq(weight, hessian, QuantScheme.parse("int4-g32"), torch.float32, drift=torch.ones(COLUMNS, COLUMNS))
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])


@pytest.mark.parametrize("kind", ["dead columns", "all dead", "one sample", "repeated sample"])
def test_singular_hessians_give_finite_codes(kind: str) -> None:
    weight, inputs, _ = _problem()
    if kind == "dead columns":
        inputs[:, 5:20] = 0
    elif kind == "all dead":
        inputs.zero_()
    elif kind == "one sample":
        inputs = inputs[:1]
    else:
        inputs = inputs[:1].expand(50, -1)
    quantized, report = gptq(weight, inputs.t() @ inputs, QuantScheme.parse("int4-g32"), torch.float32)
    assert torch.isfinite(quantized.dequantize()).all()
    assert report.dead_columns == {"dead columns": 15, "all dead": COLUMNS}.get(kind, 0)
    largest = weight.view(ROWS, -1, GROUP).abs().amax(-1, keepdim=True)
    assert ((quantized.dequantize() - weight).view(ROWS, -1, GROUP).abs() < 3 * largest).all()


@pytest.mark.parametrize("where", ["weight", "hessian"])
def test_nan_is_refused(where: str) -> None:
    weight, _, hessian = _problem()
    (weight if where == "weight" else hessian)[3, 4] = torch.nan
    with pytest.raises(NonFiniteError):
        gptq(weight, hessian, QuantScheme.parse("int4-g32"), torch.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_searched_scales_are_the_best_of_what_is_tried(scheme: str) -> None:
    weight, _, hessian = _problem()
    importance = hessian.diagonal()
    parsed = QuantScheme.parse(scheme)
    scale, zero = search_scales(weight, importance, parsed, torch.float32)
    size = COLUMNS // scale.shape[1]
    wide = scale.repeat_interleave(size, dim=1)
    offset = torch.full_like(wide, parsed.levels // 2) if zero is None else zero.repeat_interleave(size, dim=1)
    grid = Grid(wide, offset.float(), parsed.levels - 1)

    def loss(dequantized: Tensor) -> Tensor:
        return ((dequantized - weight).square() * importance).view(ROWS, -1, size).sum(-1)

    searched = loss(grid.round(weight, slice(None)) * wide)
    rounded = loss(quantize_rtn(weight, parsed, torch.float32).dequantize())
    assert (searched <= rounded * 1.0001).all()
    assert searched.sum() < 0.9 * rounded.sum()


def test_the_longer_side_serves_the_larger_weights() -> None:
    weight = torch.linspace(-0.3, 1.0, GROUP).repeat(2, 1)
    weight[1] *= -1
    scale, _ = search_scales(weight, torch.ones(GROUP), QuantScheme.parse("int4-g32"), torch.float32)
    assert scale[0, 0] < 0 < scale[1, 0]
