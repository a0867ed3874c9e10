"""GPTQ with feedback between outputs too: what it computes, and what it leaves as it is."""

from __future__ import annotations

import pytest
import torch
from schemes import any_scheme
from torch import Tensor

from quantkit.solver import two_sided
from quantkit.solver.columns import TORCH
from quantkit.solver.gptq import Damped, solve
from quantkit.solver.grid import Grid, search_scales
from quantkit.solver.two_sided import OutputFactor, solve_two_sided
from quantkit.tensors.scheme import QuantScheme

ROWS, COLUMNS = 48, 64
G32 = QuantScheme.parse("int4-g32")


def _correlated(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(8, count, generator=generator)
    rows = torch.randn(600, 8, generator=generator) @ mixed + 0.3 * torch.randn(
        600, count, generator=generator
    )
    return rows.t() @ rows / 600


def _problem() -> tuple[Tensor, Damped, Tensor]:
    """A weight [O, I], the Hessian of its inputs, and the factor of its outputs."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return weight, Damped.of_(_correlated(COLUMNS, 1)), _correlated(ROWS, 2)


def _loss(errors: Tensor, hessian: Tensor, outputs: Tensor) -> float:
    """``tr(G E H E^T)`` for errors [O, I]."""
    return (errors @ hessian * (outputs @ errors)).sum().item()


@pytest.mark.slow
def test_codes_equal_those_of_the_slow_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight after weight, each with the effect of all earlier errors on the loss taken off,
    over the whole matrix.
    """
    monkeypatch.setattr(
        two_sided, "refit_scales", lambda gradient, codes, hessian, scale: (scale, None, None)
    )
    monkeypatch.setattr(two_sided, "descend", lambda target, codes, *_: (codes, None))
    monkeypatch.setattr(two_sided, "_BLOCKS", ROWS)
    weight, hessian, factor = _problem()
    outputs = Damped.of_(factor, 0.1)
    target = weight.t().contiguous()
    scale, _ = search_scales(target, hessian.diagonal, G32, torch.float32)
    codes, _ = solve_two_sided(target, hessian, outputs, scale, None, G32, TORCH)
    rows, columns = outputs.order, hessian.order
    whole = torch.kron(
        outputs.matrix[rows][:, rows].double(), hessian.matrix[columns][:, columns].double()
    )
    upper = torch.linalg.cholesky(whole.flip(0, 1), upper=True).flip(
        0, 1
    )  # lower triangular, in the order of solving
    wanted = weight[rows][:, columns].flatten().double()
    steps = scale.t().repeat_interleave(32, 1)[rows][:, columns].flatten().double()
    errors, expected = torch.zeros_like(wanted), torch.zeros_like(wanted)
    for i in range(len(wanted)):
        aim = wanted[i] + upper[i, :i] @ errors[:i] / upper[i, i]
        expected[i] = (aim / steps[i]).round().clamp(-8, 7)
        errors[i] = wanted[i] - expected[i] * steps[i]
    found = codes.t()[rows][:, columns].flatten()
    assert (
        found == expected
    ).float().mean() > 0.99  # a code that is as good as the next one changes later ones


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-asym", "int4", "int8"])
def test_errors_that_add_up_are_smaller(scheme: str) -> None:
    weight, hessian, factor = _problem()
    parsed, before = any_scheme(scheme), factor.clone()

    def errors(outputs: OutputFactor | None) -> Tensor:
        quantized, report = solve(weight, hessian, parsed, torch.float32, output_factor=outputs)
        found = quantized.dequantize() - weight
        own = (found @ hessian.matrix * found).sum(1) - found.square() @ (
            hessian.matrix.diagonal() - hessian.diagonal
        )
        torch.testing.assert_close(report.error, own.double(), rtol=1e-2, atol=1e-6)
        return found

    alone, together = errors(None), errors(OutputFactor((factor,)))
    assert _loss(together, hessian.matrix, factor) < 0.5 * _loss(alone, hessian.matrix, factor)
    assert torch.equal(factor, before)


def test_the_sweep_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian, factor = _problem()
    outputs = Damped.of_(factor, 0.1)
    target = weight.t().contiguous()
    scale, _ = search_scales(target, hessian.diagonal, G32, torch.float32)

    def loss() -> float:
        codes, fitted = solve_two_sided(target, hessian, outputs, scale, None, G32, TORCH)
        found = Grid.of(fitted, None, G32, COLUMNS).values(codes).t() - weight
        return _loss(found, hessian.matrix, outputs.matrix)

    swept = loss()
    monkeypatch.setattr(
        two_sided, "refit_scales", lambda gradient, codes, hessian, scale: (scale, None, None)
    )
    monkeypatch.setattr(two_sided, "descend", lambda target, codes, *_: (codes, None))
    assert swept < 0.95 * loss()


def test_rows_of_a_block_do_not_all_make_up_for_the_same_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweep took each row by itself, and where gradients by outputs are nearly the same,
    weights grew with it.
    """
    monkeypatch.setattr(two_sided, "_BLOCKS", 2)
    weight, hessian, factor = _problem()
    direction = torch.exp(2 * torch.randn(ROWS, generator=torch.Generator().manual_seed(3)))
    factor += 100 * torch.outer(direction, direction)
    losses = []
    for outputs in (None, OutputFactor((factor,))):
        quantized, _ = solve(weight, hessian, G32, torch.float32, output_factor=outputs)
        errors = quantized.dequantize() - weight
        losses.append(_loss(errors, hessian.matrix, factor))
        assert errors.norm() < 0.3 * weight.norm()
    assert losses[1] < 0.9 * losses[0]


def test_uncorrelated_outputs_are_solved_one_by_one() -> None:
    weight, hessian, _ = _problem()
    alone, _ = solve(weight, hessian, G32, torch.float32)
    together, _ = solve(
        weight, hessian, G32, torch.float32, output_factor=OutputFactor((torch.eye(ROWS),))
    )
    assert (
        alone.codes == together.codes
    ).float().mean() > 0.99  # sums of other shapes round otherwise
    torch.testing.assert_close(alone.scale, together.scale, rtol=1e-2, atol=0)


def test_blocks_are_solved_as_if_they_were_layers() -> None:
    weight, hessian, factor = _problem()
    blocks = factor[:20, :20], factor[20:, 20:]
    both_blocks, first_block = OutputFactor(blocks), OutputFactor(blocks[:1])
    whole, _ = solve(weight, hessian, G32, torch.float32, output_factor=both_blocks)
    first, _ = solve(weight[:20], hessian, G32, torch.float32, output_factor=first_block)
    assert torch.equal(whole.codes[:20], first.codes)


def test_the_factor_of_some_outputs() -> None:
    blocks = tuple(_correlated(count, count) for count in (3, 5, 4))
    whole, found = torch.block_diag(*blocks), OutputFactor(blocks)
    assert found.bounds == [0, 3, 8, 12]
    for start, stop in ((0, 12), (0, 3), (1, 7), (4, 6), (8, 12)):
        part = found.rows(start, stop)
        assert torch.equal(torch.block_diag(*part.blocks), whole[start:stop, start:stop])
        assert part.bounds[-1] == stop - start
    assert torch.equal(
        torch.block_diag(*OutputFactor.concatenate([found.rows(0, 3), found.rows(3, 12)]).blocks),
        whole,
    )
