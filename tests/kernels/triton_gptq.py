"""GPTQ with Triton's kernels against torch's: through the interpreter, or on a GPU; see
`triton_products`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from schemes import any_scheme
from torch import Tensor
from triton_quick import quicken

from quantkit.kernels import triton_gptq
from quantkit.kernels.triton_words import INTERPRETED
from quantkit.model import column_kernels as column_kernels_module
from quantkit.model.column_kernels import make_gpu_kernels, select_column_kernels
from quantkit.solver import columns as columns_module
from quantkit.solver.columns import TORCH, ColumnKernels, descend, solve_codes
from quantkit.solver.gptq import Damped, GptqReport, solve
from quantkit.solver.grid import Grid, search_scales
from quantkit.tensors.qtensor import QuantTensor

quicken()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU"
)

KERNELS = make_gpu_kernels()

CASES = (
    ("int4-g32", 5, 64, 32),
    ("int4-g32-asym", 530, 32, 8),
    ("int4-g64-asym", 37, 128, 4),
    ("int4-g128", 3, 128, 4),
    ("int4", 19, 53, 8),
    ("int8", 1, 33, 8),
    ("iq4_nl", 37, 64, 8),
)
"""Schemes, rows, columns, and columns of a launch: more rows than a program takes, panels and
launches not full.
"""


def _problem(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A weight and a Hessian of correlated inputs of different size, of which two are always
    zero.
    """
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(2 * columns, columns, generator=generator)
    inputs = (inputs + inputs.roll(1, 1)) * torch.logspace(-1, 1, columns)[
        torch.randperm(columns, generator=generator)
    ]
    inputs[:, [1, columns - 2]] = 0
    return torch.randn(rows, columns, generator=generator).to(DEVICE), (inputs.t() @ inputs).to(
        DEVICE
    )


def _equal(found: Tensor, expected: Tensor) -> bool:
    """All codes, but for a few that rounded the other way as sums had another order."""
    return (found != expected).sum().item() <= found.numel() // 1000 + 1


@pytest.mark.parametrize(("name", "rows", "columns", "together"), CASES)
def test_kernels_give_the_codes_that_torch_gives(
    name: str, rows: int, columns: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_module, "PANEL_COLUMNS", 3 * together)
    kernels = replace(KERNELS, max_columns=together)
    weight, hessian = _problem(rows, columns)
    scheme = any_scheme(name)
    damped = Damped.of_(hessian)
    wanted = weight.t().contiguous()
    scale, zero = search_scales(wanted, damped.diagonal, scheme.of_floats, torch.float32)
    grid = Grid.of(scale, zero, scheme, columns)
    given = wanted, damped.factor, grid, damped.order
    codes, whitened = solve_codes(*given)
    found, others = solve_codes(*given, kernels)
    assert _equal(found, codes)
    torch.testing.assert_close(others.square().sum(), whitened.square().sum(), rtol=1e-3, atol=0)
    moved, gain = descend(wanted, codes, damped.matrix, grid, damped.order)
    found, others = descend(wanted, codes, damped.matrix, grid, damped.order, kernels)
    assert _equal(found, moved)
    torch.testing.assert_close(others.sum(), gain.sum(), rtol=1e-3, atol=1e-3)
    assert not torch.equal(moved, codes) or rows == 1


def test_a_layer_loses_as_little_with_kernels() -> None:
    weight, hessian = _problem(21, 64)

    def solved(kernels: ColumnKernels) -> tuple[QuantTensor, GptqReport]:
        return solve(
            weight,
            Damped.of_(hessian.clone()),
            any_scheme("int4-g32-asym"),
            torch.bfloat16,
            kernels=kernels,
        )

    (found, report), (expected, other) = solved(replace(KERNELS, max_columns=8)), solved(TORCH)
    assert _equal(found.codes, expected.codes)
    assert report.output_error == pytest.approx(other.output_error, rel=1e-4)


def test_kernels_are_tried_before_they_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert column_kernels_module._describe_mismatch(replace(KERNELS, max_columns=4), DEVICE) is None
    assert INTERPRETED or select_column_kernels(DEVICE) == KERNELS  # a CPU has kernels of its own
    right = triton_gptq.round_in_turn
    monkeypatch.setattr(
        triton_gptq, "round_in_turn", lambda *given: (right(*given), given[-1].zero_())
    )
    assert "output error" in (
        column_kernels_module._describe_mismatch(make_gpu_kernels(), DEVICE) or ""
    )
