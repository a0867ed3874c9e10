"""GGUF's blocks in the solver: searched scales, GPTQ on their grid, float16 scales that fit the
codes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.model.column_kernels import select_column_kernels
from quantkit.solver.block_grid import search_blocks
from quantkit.solver.columns import TORCH
from quantkit.solver.gptq import Damped, solve
from quantkit.solver.grid import Grid, search_scales
from quantkit.solver.rounding import round_to_nearest
from quantkit.tensors.qtensor import QuantTensor, nearest_codes, quantize_rtn
from quantkit.tensors.scheme import GGUF_SCHEMES, QuantScheme, Scales

IN_BLOCKS = sorted(
    name for name, scheme in GGUF_SCHEMES.items() if scheme.scales is not Scales.FLOATS
)


def problem(columns: int = 512, rows: int = 12) -> tuple[Tensor, Tensor]:
    """Weights [O, I], and the Hessian of correlated inputs of different sizes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(
        rows, 1, generator=generator
    ).add_(0.2)
    mixed = torch.eye(columns) + 0.05 * torch.randn(columns, columns, generator=generator)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mixed
    inputs *= 3 * torch.rand(columns, generator=generator)
    return weight * 0.05 + 0.01, inputs.T @ inputs


def output_error(value: QuantTensor, weight: Tensor, hessian: Tensor) -> float:
    missing = (value.dequantize() - weight).double()
    return float(((missing @ hessian.double()) * missing).sum())


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_solved_blocks_are_closer_than_rounded_ones(name: str) -> None:
    scheme = GGUF_SCHEMES[name]
    weight, hessian = problem()
    kernels = select_column_kernels(weight.device)
    found, report = solve(
        weight, Damped.of_(hessian.clone()), scheme, torch.float16, kernels=kernels
    )
    weights = hessian.diagonal() / hessian.diagonal().mean()
    searched, _ = round_to_nearest(weight, scheme, torch.float16, select_column_kernels, weights)
    spanning = quantize_rtn(weight, scheme, torch.float16)
    errors = [output_error(one, weight, hessian) for one in (found, searched, spanning)]
    assert errors[0] < 0.6 * errors[1] < 0.6 * errors[2], "solved, searched, spanning"
    energy = float(((weight.double() @ hessian.double()) * weight.double()).sum())
    assert report.output_error == pytest.approx((errors[0] / energy) ** 0.5, rel=0.02)


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q6_k", "iq4_nl", "iq4_xs"])
def test_kernels_and_torch_find_the_same(name: str) -> None:
    weight, hessian = problem(rows=5)
    found = [
        solve(
            weight, Damped.of_(hessian.clone()), GGUF_SCHEMES[name], torch.float16, kernels=kernels
        )[0]
        for kernels in (TORCH, select_column_kernels(weight.device))
    ]
    errors = [
        output_error(one, weight, hessian) for one in found
    ]  # steps of both signs may be equally good
    assert errors[0] == pytest.approx(errors[1], rel=0.03)


def test_fitted_scales_are_no_worse_than_the_searched_ones() -> None:
    """On its way, GPTQ replaces the float16 scales; the integers stay those of the search."""
    scheme = GGUF_SCHEMES["q4_k"]
    weight, hessian = problem()
    damped = Damped.of_(hessian.clone())
    searched = search_blocks(weight.t().contiguous(), damped.diagonal, scheme, TORCH.search_scales)
    found, _ = solve(weight, damped, scheme, torch.float16)
    assert found.scale.equal(searched.scale)
    assert found.minimum is not None
    assert searched.minimum is not None
    assert found.minimum.equal(searched.minimum)
    assert found.outer is not None
    assert not found.outer.equal(searched.outer)
    assert torch.allclose(found.outer.float(), searched.outer.float(), rtol=0.2)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_zeros_and_outliers(name: str) -> None:
    """Groups, blocks and rows of zeros stay zero; an outlier does not make the others of its
    block vanish.
    """
    scheme = GGUF_SCHEMES[name]
    weight, hessian = problem(rows=4)
    weight[0] = 0
    weight[1, :256] = 0
    weight[2, 32:64] = 0
    weight[3, 7] = 40 * weight[3].abs().max()
    found, _ = solve(weight, Damped.of_(hessian), scheme, torch.float16)
    for value in (found, quantize_rtn(weight, scheme, torch.float16)):
        floats = value.dequantize()
        assert floats.isfinite().all()
        assert not floats[0].any()
        assert not floats[1, :256].any()
    assert not quantize_rtn(weight, scheme, torch.float16).dequantize()[2, 32:64].any()
    assert found.dequantize()[3, 7] == pytest.approx(weight[3, 7].item(), rel=0.1)


def test_a_step_of_zero_has_the_middle_code() -> None:
    scheme = QuantScheme.parse("q6_k")
    value = quantize_rtn(torch.zeros(1, 256), scheme, torch.float16)
    scales = value.block_scales
    assert scales is not None
    assert nearest_codes(torch.ones(1, 16, 16), scales, scheme).unique().tolist() == [32]
    assert Grid.of_blocks(scales, scheme, 256).values(torch.zeros(256, 1)).unique().tolist() == [0]


def test_a_table_keeps_groups_of_which_no_weight_counts() -> None:
    weight = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    importance = torch.ones(64)
    importance[:32] = 0
    scales = search_blocks(weight, importance, GGUF_SCHEMES["iq4_nl"], search_scales)
    assert (scales.steps != 0).all()
