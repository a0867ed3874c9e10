"""The GPTQ solver against plain and slow computations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from schemes import any_scheme
from torch import Tensor

from quantkit.errors import NonFiniteError
from quantkit.solver import columns as columns_module
from quantkit.solver import gptq as gptq_module
from quantkit.solver import grid as grid_module
from quantkit.solver.columns import TORCH, descend, solve_codes
from quantkit.solver.gptq import (
    Damped,
    SingularError,
    refit_scales,
    reverse_factor,
    solve,
)
from quantkit.solver.grid import Grid, search_scales
from quantkit.solver.rounding import round_to_nearest
from quantkit.solver.two_sided import OutputFactor
from quantkit.tensors.qtensor import quantize_rtn
from quantkit.tensors.scheme import QuantScheme

ROWS, COLUMNS, GROUP = 12, 96, 32
SCHEMES = ["int4-g32", "int4-g32-asym", "int4", "int8"]


def _problem(
    dtype: torch.dtype = torch.float32, samples: int = 400
) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, inputs whose columns are correlated and of very different size, and their
    Hessian.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, COLUMNS, generator=generator) @ torch.randn(
        COLUMNS, COLUMNS, generator=generator
    )
    inputs = (
        inputs * torch.logspace(-1, 1, COLUMNS)[torch.randperm(COLUMNS, generator=generator)]
    ).to(dtype)
    weight = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    return weight, inputs, inputs.t() @ inputs


def _transposed(
    dtype: torch.dtype = torch.float32, samples: int = 400
) -> tuple[Tensor, Tensor, Tensor]:
    """The problem as the solver's steps take it: weight [I, O], inputs, Hessian."""
    weight, inputs, hessian = _problem(dtype, samples)
    return weight.t().contiguous(), inputs, hessian


def _grid(weight: Tensor) -> Grid:
    """Scales that span each group of a weight [I, O]."""
    return Grid(
        weight.view(-1, GROUP, ROWS).abs().amax(1) / 7.5, None, QuantScheme.parse("int4-g32"), GROUP
    )


def _nearest(steps: Tensor, grid: Grid, zero: Tensor | float = 8) -> Tensor:
    """The nearest codes less their zero points, in units of the scale."""
    return (steps.round() + zero).clamp(0, grid.scheme.levels - 1) - zero


def _rounded(weight: Tensor, grid: Grid) -> Tensor:
    """The nearest codes of a weight [I, O], less their zero points."""
    steps = weight / grid.scale.repeat_interleave(grid.size, dim=0)
    if grid.zero is None:
        return _nearest(steps, grid, grid.scheme.levels // 2)
    return _nearest(steps, grid, grid.zero.repeat_interleave(grid.size, dim=0))


def _loss(weight: Tensor, codes: Tensor, grid: Grid, hessian: Tensor) -> float:
    error = weight - grid.values(codes)
    return ((hessian @ error) * error).sum().item()


def _damped(hessian: Tensor) -> Tensor:
    return hessian + 0.01 * hessian.diagonal().mean() * torch.eye(COLUMNS, dtype=hessian.dtype)


def _slow(weight: Tensor, hessian: Tensor, grid: Grid, order: list[int]) -> Tensor:
    """One input at a time, the inverse of those left taken anew at each."""
    rest = weight.clone()
    codes = torch.zeros_like(weight)
    left = list(order)
    while left:
        inverse = torch.linalg.inv(hessian[left][:, left])
        column, scale = left[0], grid.scale[left[0] // grid.size]
        codes[column] = _nearest(rest[column] / scale, grid)
        error = (rest[column] - codes[column] * scale) / inverse[0, 0]
        rest[left] -= inverse[0].unsqueeze(1) * error
        left = left[1:]
    return codes


def test_codes_equal_those_of_the_slow_computation() -> None:
    weight, _, hessian = _transposed(torch.float64)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    grid = _grid(weight)
    found, _ = solve_codes(weight, reverse_factor(_damped(hessian), order), grid, order)
    assert torch.equal(found, _slow(weight, _damped(hessian), grid, order.tolist()))
    assert not torch.equal(found, _rounded(weight, grid))


@pytest.mark.parametrize(("panel", "at_once"), [(1, 1), (7, 3), (32, 32), (96, 64), (1000, 1000)])
def test_panels_change_nothing(panel: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _, hessian = _transposed(torch.float64)
    order = torch.arange(COLUMNS)
    factor = reverse_factor(_damped(hessian), order)
    expected, whitened = solve_codes(weight, factor, _grid(weight), order)
    monkeypatch.setattr(columns_module, "PANEL_COLUMNS", panel)
    codes, others = solve_codes(
        weight, factor, _grid(weight), order, replace(TORCH, max_columns=at_once)
    )
    assert torch.equal(codes, expected)
    torch.testing.assert_close(others, whitened)


def test_uncorrelated_inputs_make_it_round_to_nearest() -> None:
    weight, _, _ = _transposed()
    grid = _grid(weight)
    order = torch.randperm(COLUMNS)
    found, _ = solve_codes(weight, reverse_factor(torch.eye(COLUMNS), order), grid, order)
    assert torch.equal(found, _rounded(weight, grid))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_error_is_well_below_that_of_rounding(scheme: str, dtype: torch.dtype) -> None:
    weight, inputs, hessian = _problem()
    parsed = any_scheme(scheme)
    quantized, report = solve(weight, Damped.of_(hessian.clone()), parsed, dtype)
    outputs = inputs @ weight.t()

    def error(dequantized: Tensor) -> float:
        return ((inputs @ dequantized.t() - outputs).norm() / outputs.norm()).item()

    assert quantized.scale.dtype == dtype
    assert report.output_error == pytest.approx(error(quantized.dequantize()), rel=0.02)
    assert report.output_error < 0.7 * error(quantize_rtn(weight, parsed, dtype).dequantize())


def test_refitted_scales_and_descent_lower_the_loss() -> None:
    weight, _, hessian = _transposed()
    hessian = _damped(hessian)
    grid = _grid(weight)
    order = torch.argsort(hessian.diagonal(), descending=True)
    codes, whitened = solve_codes(weight, reverse_factor(hessian, order), grid, order)
    first = _loss(weight, codes, grid, hessian)
    assert whitened.square().sum().item() == pytest.approx(first, rel=1e-4)
    scale, fitted, explained = refit_scales(
        hessian @ (weight - grid.values(codes)), codes, hessian, grid.scale
    )
    whole = ((hessian @ weight) * weight).sum().item()
    assert explained.sum().item() == pytest.approx(whole - first, rel=1e-4)
    refitted = replace(grid, scale=scale)
    second = _loss(weight, codes, refitted, hessian)
    assert fitted.sum().item() == pytest.approx(first - second, rel=1e-3)
    moved, descended = descend(weight, codes, hessian, refitted, order)
    third = _loss(weight, moved, refitted, hessian)
    assert descended.sum().item() == pytest.approx(second - third, rel=1e-3)
    assert first > second > third


@pytest.mark.parametrize(("panel", "at_once"), [(1, 1), (7, 3), (96, 64)])
def test_descent_gives_each_input_its_best_codes_in_turn(
    panel: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_module, "PANEL_COLUMNS", panel)
    weight, _, hessian = _transposed(torch.float64)
    grid = _grid(weight)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    codes = _rounded(weight, grid)
    expected = codes.clone()
    for column in order.tolist():
        others = weight - grid.values(expected)
        others[column] = weight[column]
        wanted = (hessian[column] @ others) / hessian[column, column]
        expected[column] = _nearest(wanted / grid.scale[column // GROUP], grid)
    found, _ = descend(weight, codes, hessian, grid, order, replace(TORCH, max_columns=at_once))
    assert torch.equal(found, expected)
    assert not torch.equal(expected, codes)


def test_refitted_scales_are_those_of_least_squares() -> None:
    weight, inputs, hessian = _transposed(samples=2000)
    grid = _grid(weight)
    codes = _rounded(weight, grid)
    found, _, _ = refit_scales(hessian @ (weight - grid.values(codes)), codes, hessian, grid.scale)
    columns = (inputs.unsqueeze(2) * codes).view(len(inputs), -1, GROUP, ROWS).sum(2)
    outputs = inputs @ weight
    for row in range(ROWS):
        expected = torch.linalg.lstsq(columns[:, :, row], outputs[:, row : row + 1]).solution[:, 0]
        torch.testing.assert_close(found[:, row], expected, rtol=1e-3, atol=1e-4)


def test_drift_of_the_inputs_is_made_up_for() -> None:
    weight, inputs, hessian = _problem()
    generator = torch.Generator().manual_seed(5)
    seen = inputs @ (torch.eye(COLUMNS) + 0.05 * torch.randn(COLUMNS, COLUMNS, generator=generator))
    hessian, drift = seen.t() @ seen, (inputs - seen).t() @ seen
    wanted = inputs @ weight.t()
    scheme = QuantScheme.parse("int4-g32")

    def error(target: Tensor | None) -> float:
        quantized, _ = solve(
            weight, Damped.of_(hessian.clone()), scheme, torch.float32, target=target
        )
        return (seen @ quantized.dequantize().t() - wanted).norm().item()

    target = weight + Damped.of_(hessian.clone()).divide(weight @ drift)
    assert error(target) < 0.5 * error(None)
    quantized, report = solve(
        weight, Damped.of_(hessian.clone()), scheme, torch.float32, target=target
    )
    lost = (seen @ (quantized.dequantize() - target).t()).square().sum(0)
    torch.testing.assert_close(report.error, lost.double(), rtol=1e-2, atol=0)
    torch.testing.assert_close(
        report.energy, (seen @ target.t()).square().sum(0).double(), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_may_be_solved_apart(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _, hessian = _problem()
    parsed = any_scheme(scheme)
    whole, whole_report = solve(weight, Damped.of_(hessian.clone()), parsed, torch.float32)
    monkeypatch.setattr(gptq_module, "weights_at_once", lambda device: 5 * COLUMNS)
    parts, parts_report = solve(weight, Damped.of_(hessian.clone()), parsed, torch.float32)
    assert (
        parts.codes == whole.codes
    ).float().mean() > 0.99  # sums of other shapes round otherwise
    torch.testing.assert_close(parts.scale, whole.scale, rtol=1e-2, atol=0)
    torch.testing.assert_close(parts_report.energy, whole_report.energy, rtol=1e-5, atol=0)
    assert parts_report.output_error == pytest.approx(whole_report.output_error, rel=0.01)


def test_threads_that_search_scales_have_none_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    class Noted(grid_module._Search):
        def __init__(self, *given: Any, **options: Any) -> None:
            threads.append(torch.get_num_threads())
            super().__init__(*given, **options)

    monkeypatch.setattr(grid_module, "_Search", Noted)
    monkeypatch.setattr(grid_module, "choose_search_batch_size", lambda device: 32 * 32)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch.no_grad():  # which is the caller's alone
            weight = torch.randn(96, 64, requires_grad=True)
            search_scales(weight, torch.rand(96), QuantScheme.parse("int4-g32"), torch.float32)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert threads == [1] * 6


def test_inputs_are_not_changed() -> None:
    weight, _, hessian = _problem()
    before = weight.clone(), hessian.clone()
    solve(
        weight,
        Damped.of_(hessian.clone()),
        QuantScheme.parse("int4-g32"),
        torch.float32,
        target=weight + 1,
    )
    damped, pull = Damped.of_(hessian.clone()), torch.randn(ROWS, COLUMNS)
    matrix, kept = damped.matrix.clone(), pull.clone()
    target = weight + damped.divide(pull)
    solve(weight, damped, QuantScheme.parse("int8"), torch.float32, target=target)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])
    assert torch.equal(damped.matrix, matrix)
    assert torch.equal(pull, kept)


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
    quantized, report = solve(
        weight, Damped.of_(inputs.t() @ inputs), QuantScheme.parse("int4-g32"), torch.float32
    )
    assert torch.isfinite(quantized.dequantize()).all()
    assert report.dead_columns == {"dead columns": 15, "all dead": COLUMNS}.get(kind, 0)
    largest = weight.view(ROWS, -1, GROUP).abs().amax(-1, keepdim=True)
    assert ((quantized.dequantize() - weight).view(ROWS, -1, GROUP).abs() < 3 * largest).all()


@pytest.mark.parametrize("where", ["weight", "hessian"])
def test_nan_is_refused(where: str) -> None:
    weight, _, hessian = _problem()
    (weight if where == "weight" else hessian)[3, 4] = torch.nan
    with pytest.raises(NonFiniteError):
        solve(weight, Damped.of_(hessian.clone()), QuantScheme.parse("int4-g32"), torch.float32)


def test_a_hessian_that_no_damping_helps_is_an_error() -> None:
    weight, _, _ = _problem()
    indefinite = torch.full((COLUMNS, COLUMNS), 5.0).fill_diagonal_(1)
    with pytest.raises(SingularError):
        solve(weight, Damped.of_(indefinite.clone()), QuantScheme.parse("int4-g32"), torch.float32)


def test_damping_is_raised_in_steps() -> None:
    hessian = torch.eye(COLUMNS)
    hessian[0, 1] = hessian[1, 0] = 1.05
    damped = Damped.of_(hessian.clone())
    assert damped.damping == pytest.approx(0.1)
    torch.testing.assert_close(damped.matrix, hessian + 0.1 * torch.eye(COLUMNS))
    assert torch.equal(damped.diagonal, torch.ones(COLUMNS))
    assert Damped.of_(torch.eye(COLUMNS)).damping == 0.01
    assert Damped.of_(torch.eye(COLUMNS), 0.2).damping == 0.2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_searched_scales_beat_those_that_span_the_group(scheme: str) -> None:
    weight, _, hessian = _transposed()
    importance = hessian.diagonal()
    parsed = any_scheme(scheme)
    scale, zero = search_scales(weight, importance, parsed, torch.float32)
    grid = Grid.of(scale, zero, parsed, COLUMNS)

    def loss(dequantized: Tensor) -> Tensor:
        errors = (dequantized - weight).square() * importance.unsqueeze(1)
        return errors.view(scale.shape[0], -1, ROWS).sum(1)

    searched = loss(grid.values(_rounded(weight, grid)))
    rounded = loss(quantize_rtn(weight.t().contiguous(), parsed, torch.float32).dequantize().t())
    assert (searched <= rounded * 1.0001).all()
    assert searched.sum() < 0.9 * rounded.sum()


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _, hessian = _transposed()
    scheme = QuantScheme.parse("int4-g32-asym")
    whole = search_scales(weight, hessian.diagonal(), scheme, torch.float32)
    monkeypatch.setattr(grid_module, "choose_search_batch_size", lambda device: 1)
    monkeypatch.setattr(grid_module, "MIN_TILE_ROWS", 5)
    tiled = search_scales(weight, hessian.diagonal(), scheme, torch.float32)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole, tiled, strict=True)
        if a is not None and b is not None
    )


def test_the_longer_side_serves_the_larger_weights() -> None:
    weight = torch.linspace(-0.3, 1.0, GROUP).repeat(2, 1)
    weight[1] *= -1
    scale, _ = search_scales(
        weight.t().contiguous(), torch.ones(GROUP), QuantScheme.parse("int4-g32"), torch.float32
    )
    assert scale[0, 0] < 0 < scale[0, 1]


def test_many_groups_are_fitted_with_several_threads() -> None:
    """As int4-g32 has them in a linear of 6144 inputs; torch's own LU of a batch fails there."""
    groups, size, rows = 192, 4, 64
    inputs = torch.randn(groups * size, groups * size).double()
    hessian = (inputs @ inputs.t() / len(inputs) + torch.eye(len(inputs))).float()
    codes, scale = (
        torch.randint(-8, 8, (groups * size, rows)).float(),
        torch.rand(groups, rows) + 0.5,
    )
    lacks = torch.randn(groups * size, rows) * 0.1
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found, _, _ = refit_scales(hessian @ lacks, codes, hessian, scale)
    finally:
        torch.set_num_threads(threads)
    for row in (0, rows - 1):
        columns = torch.zeros(
            groups * size, groups, dtype=torch.float64
        )  # what each scale multiplies
        columns[torch.arange(groups * size), torch.arange(groups * size) // size] = codes[
            :, row
        ].double()
        normal = columns.t() @ hessian.double() @ columns
        change = torch.linalg.solve(
            normal, columns.t() @ (hessian.double() @ lacks[:, row].double())
        )
        torch.testing.assert_close(
            found[:, row].double(), scale[:, row].double() + change, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int8", "q4_k", "q6_k", "nvfp4"])
def test_a_share_without_rows_is_like_one_with_rows(name: str) -> None:
    scheme = QuantScheme.parse(name)
    weight = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    start = None
    if scheme.of_small_floats:
        outer = torch.ones(1)
        start, _ = round_to_nearest(weight, scheme, torch.float16, lambda _: TORCH, outer=outer)
    damped = Damped.of_(torch.eye(256))
    kinds = []
    for rows in (0, 2):
        solved, report = solve(
            weight[:rows],
            damped,
            scheme,
            torch.float16,
            start=None if start is None else start.rows(0, rows),
            output_factor=OutputFactor((torch.eye(rows),) if rows else ()),
        )
        tensors = [report.error, report.energy]

        def keep(tensor: Tensor, tensors: list[Tensor] = tensors) -> Tensor:
            tensors.append(tensor)
            return tensor

        solved.map(keep)
        # What processes join has the same types and columns in each of them.
        assert {len(tensor) for tensor in tensors[:3]} == {rows}
        kinds.append([(tensor.dtype, tensor.shape[1:]) for tensor in tensors])
    assert kinds[0] == kinds[1]
