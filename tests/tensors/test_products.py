"""Matrix products, factors and sums that calibration is made of, against torch's own."""

from __future__ import annotations

import pytest
import torch

from quantkit.calibration import hessian as hessian_module
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.distributed.group import SINGLE
from quantkit.solver import gptq as gptq_module
from quantkit.solver.gptq import cholesky, solve_factored, upper_transposed_times
from quantkit.tensors import products
from quantkit.tensors.products import (
    add_square_,
    fill_lower_,
    multiplies_bfloat16,
    times,
)


@pytest.mark.parametrize("shape", [(3, 5, 7), (16, 300, 257), (130, 129, 140)])
@pytest.mark.parametrize("form", ["dense", "transposed", "part"])
@pytest.mark.parametrize("onednn", [True, False])
def test_products_are_torchs(
    shape: tuple[int, int, int], form: str, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(products, "_is_faster_through_onednn", lambda: onednn)
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    if form == "transposed":
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    elif form == "part":
        a, b = (
            torch.randn(rows + 2, inner + 3)[1:-1, 3:],
            torch.randn(inner + 1, columns + 5)[1:, 2:-3],
        )
    torch.testing.assert_close(times(a, b), a @ b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(times(a.double(), b.double()), a.double() @ b.double())


@pytest.mark.parametrize("product", [1, 300, 1 << 20])
@pytest.mark.parametrize("width", [1, 7, 8, 100, 129])
def test_triangles_are_the_whole_square(
    width: int, product: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "PRODUCT_ELEMENTS", product)
    total, expected = torch.zeros(width, width), torch.zeros(width, width)
    for count in (1, 33):
        x = torch.randn(count, width)
        add_square_(total, x.t())
        expected += x.t() @ x
    fill_lower_(total)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("together", [1, 8, 64])
def test_sums_over_inputs_are_the_same_however_many_wait(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hessian_module, "ROWS_AT_ONCE", together)
    accumulator = HessianAccumulator(5, 3, torch.device("cpu"))
    alone, paired, apart = (torch.randn(28, width) for width in (5, 5, 3))
    for rows in (slice(0, 3), slice(3, 23), slice(23, 28)):
        accumulator.add(alone[rows].unsqueeze(0))
        accumulator.add_pair(paired[rows], apart[rows])
    hessian, squares, drift, _ = accumulator.release(SINGLE)
    torch.testing.assert_close(squares, paired.t() @ paired)
    torch.testing.assert_close(hessian, alone.t() @ alone + squares)
    torch.testing.assert_close(drift, apart.t() @ paired)


@pytest.mark.parametrize("size", [1, 7, 32, 61])
def test_factors_and_what_they_solve(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq_module, "BLOCK_SIZE", 8)
    x, right = (
        torch.randn(2 * size + 1, size, dtype=torch.float64),
        torch.randn(size, 3, dtype=torch.float64),
    )
    matrix = x.t() @ x
    factor = cholesky(matrix.clone())
    assert factor is not None
    torch.testing.assert_close(factor, torch.linalg.cholesky(matrix, upper=True))
    torch.testing.assert_close(matrix @ solve_factored(factor, right), right)
    torch.testing.assert_close(upper_transposed_times(factor, right), factor.t() @ right)
    assert cholesky(matrix - 10 * matrix.trace() * torch.eye(size)) is None


@pytest.mark.parametrize(
    ("setting", "capability", "bf16", "expected"),
    [
        ("1", "AVX512", True, True),
        (None, "AVX512", True, True),
        ("0", "AVX512", True, False),
        ("1", "AVX2", True, False),
        ("1", "AVX512", False, False),
    ],
)
def test_bfloat16_goes_where_the_processor_multiplies_it_unless_it_is_forbidden(
    setting: str | None,
    capability: str,
    bf16: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(products.BFLOAT16_SETTING, raising=False)
    if setting is not None:
        monkeypatch.setenv(products.BFLOAT16_SETTING, setting)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert multiplies_bfloat16() is expected


@pytest.mark.parametrize(
    ("machine", "intel", "mkl", "expected"),
    [
        ("x86_64", False, True, True),
        ("x86_64", True, True, False),
        ("x86_64", True, False, True),
        ("aarch64", False, False, False),
    ],
)
def test_float32_goes_to_what_is_fastest_on_the_processor(
    machine: str, intel: bool, mkl: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products.platform, "machine", lambda: machine)
    monkeypatch.setattr(products, "_is_intel", lambda: intel)
    monkeypatch.setattr(products, "_onednn_is_built_in", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert products._is_faster_through_onednn.__wrapped__() is expected
