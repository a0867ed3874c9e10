"""Rounding on searched scales, compared with rounding on scales that span the groups and with
llama.cpp's Q4_0.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.model.column_kernels import select_column_kernels
from quantkit.solver.columns import TORCH, ColumnKernels
from quantkit.solver.rounding import quantize_searched, round_to_nearest
from quantkit.tensors.qtensor import QuantTensor, Solver, quantize_rtn, relative_error
from quantkit.tensors.scheme import SCHEMES

INT4 = [name for name in SCHEMES if name.startswith("int4")]
KERNELS = {"torch": lambda: TORCH, "cpp": lambda: select_column_kernels(torch.device("cpu"))}


def group_errors(quantized: QuantTensor, weight: Tensor) -> Tensor:
    """The squared errors of groups [O, G]."""
    rows, groups = quantized.scale.shape
    return (quantized.dequantize() - weight.float()).view(rows, groups, -1).square().sum(-1)


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> ColumnKernels:
    found: ColumnKernels = KERNELS[request.param]()
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", INT4)
def test_no_group_has_a_larger_error_than_on_scales_that_span_it(
    name: str, dtype: torch.dtype, kernels: ColumnKernels
) -> None:
    weight = torch.randn(70, 384).mul_(torch.randn(70, 384).exp_()).to(dtype)
    scheme = SCHEMES[name]
    searched = group_errors(quantize_searched(weight, scheme, dtype, kernels), weight)
    spanning = group_errors(quantize_rtn(weight, scheme, dtype), weight)
    assert (searched <= spanning * (1 + 1e-5)).all()
    assert searched.sum() < (0.9 if scheme.symmetric else 0.99) * spanning.sum()


def test_errors_are_smaller_than_those_of_the_gguf_library_at_the_same_size(
    kernels: ColumnKernels,
) -> None:
    weight = torch.randn(64, 512)
    kind = gguf.GGMLQuantizationType.Q4_0
    theirs = gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind).astype(np.float32)
    ours = quantize_searched(weight, SCHEMES["int4-g32"], torch.float16, kernels)
    error = (torch.from_numpy(theirs) - weight).square().sum()
    assert group_errors(ours, weight).sum() < 0.9 * error


def test_a_weight_larger_than_one_search_is_the_same_as_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quantkit.solver import rounding

    weight, scheme = torch.randn(96, 64), SCHEMES["int4-g32-asym"]
    whole = quantize_searched(weight, scheme, torch.bfloat16)
    monkeypatch.setattr(rounding, "SEARCHED_ELEMENTS", 10 * 64)
    parts = quantize_searched(weight, scheme, torch.bfloat16)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scale, parts.scale)


def test_int8_is_rounded_on_scales_that_span_its_rows() -> None:
    weight = torch.randn(8, 64)
    found, solver = round_to_nearest(
        weight, SCHEMES["int8"], torch.bfloat16, lambda _: pytest.fail("kernels are not needed")
    )
    expected = quantize_rtn(weight, SCHEMES["int8"], torch.bfloat16)
    assert solver == Solver.ROUNDING
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)
    assert (
        round_to_nearest(weight, SCHEMES["int4-g32"], torch.bfloat16, lambda _: TORCH)[1]
        == Solver.SEARCHED
    )


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym"])
def test_groups_of_zeros_stay_zero_and_scales_that_overflow_are_infinite(
    name: str, kernels: ColumnKernels
) -> None:
    weight = torch.randn(4, 64)
    weight[0, :32] = 0
    weight[1, 32:] *= 1e7
    found = quantize_searched(weight, SCHEMES[name], torch.float16, kernels)
    assert not found.dequantize()[0, :32].any()
    assert found.scale[1, 1].isinf()
    assert found.scale.isfinite().sum() == found.scale.numel() - 1


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym"])
def test_groups_whose_squares_overflow_are_rounded_on_scales_that_span_them(
    name: str, kernels: ColumnKernels
) -> None:
    weight = torch.randn(4, 64)
    weight[1, 32:] *= 1e20
    found = quantize_searched(weight, SCHEMES[name], torch.bfloat16, kernels)
    assert relative_error(found, weight) < 0.15
    assert relative_error(found.rows(2, 4), weight[2:]) < 0.1
