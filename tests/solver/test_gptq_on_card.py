"""GPTQ on a card, as far as a machine without one shows: nothing is read on the host, and what
fits stays there.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.calibration.effort import EFFORTS, activation_bytes
from quantkit.calibration.estimate import gptq_bytes, gpu_activation_bytes
from quantkit.formats.detect import open_checkpoint
from quantkit.passes import activation_store
from quantkit.passes.activation_store import ActivationStore
from quantkit.solver.columns import ColumnKernels, descend, solve_codes
from quantkit.solver.gptq import refit_scales
from quantkit.solver.grid import Grid, search_scales, weights_at_once
from quantkit.tensors import products
from quantkit.tensors.products import compute_dtype, exact_float32
from quantkit.tensors.scheme import QuantScheme

README_FILE = torch.device("cuda", 0)
META = torch.device("meta")
"""Has no values, so that reading one fails."""


class _Launches:
    """Kernels that note of which columns they are launched."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def round_in_turn(self, start: Tensor, *given: Any) -> None:
        self.counts.append(len(start))

    improve_in_turn = round_in_turn


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-asym"])
def test_the_loops_over_columns_read_nothing_on_the_host(scheme: str) -> None:
    columns, rows = 160, 7
    wanted, hessian = (
        torch.empty(columns, rows, device=META),
        torch.empty(columns, columns, device=META),
    )
    order, found = torch.empty(columns, dtype=torch.long, device=META), QuantScheme.parse(scheme)
    scale, zero = search_scales(wanted, hessian.diagonal(), found, torch.bfloat16)
    grid, launches = Grid.of(scale, zero, found, columns), _Launches()
    kernels = ColumnKernels(search_scales, launches.round_in_turn, launches.improve_in_turn, 32)
    codes, whitened = solve_codes(wanted, hessian, grid, order, kernels)
    assert launches.counts == [32] * 5
    assert refit_scales(whitened, codes, hessian, scale)[0].shape == scale.shape
    assert descend(wanted, codes, hessian, grid, order, kernels)[0].shape == codes.shape
    assert launches.counts == [32] * 10


def test_activations_of_a_gpu_are_brought_to_memory_while_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[bool] = []

    def bring(value: Tensor, *, stays: bool) -> Tensor:
        brought.append(stays)
        return torch.zeros(value.shape)

    monkeypatch.setattr(activation_store, "_to_host", bring)
    store = ActivationStore(tmp_path / "states", 32, gpu_bytes=40)
    for key in range(2):
        store.put(key, torch.empty(2, 4, device=META))
    assert brought == [True, False]
    assert len(list((tmp_path / "states").iterdir())) == 1
    assert [store.take(key).device.type for key in (0, 1)] == ["cpu", "cpu"]


def _readme(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))


def test_what_is_predicted_follows_the_gpu(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shape = open_checkpoint(demo_model).config, (8, 64)
    monkeypatch.setattr("quantkit.solver.grid.WEIGHTS_AT_ONCE", 1 << 10)
    on_cpu = gptq_bytes(config, 64, torch.device("cpu"))
    _readme(monkeypatch, 80 * 10**9, 10**9)
    assert weights_at_once(README_FILE) == 1 << 28
    assert gptq_bytes(config, 64, README_FILE) > on_cpu
    room = gpu_activation_bytes(config, shape, README_FILE)
    whole = sum(activation_bytes(config, shape, EFFORTS["default"], 10**9))
    assert room > whole
    assert activation_bytes(config, shape, EFFORTS["default"], 10**9, room) == (0, 0, whole)
    assert activation_bytes(config, shape, EFFORTS["default"], 1000, whole - 1500) == (
        1000,
        500,
        whole - 1500,
    )
    _readme(monkeypatch, 8 * 10**9, 10**6)
    assert weights_at_once(README_FILE) == 1 << 26
    assert gpu_activation_bytes(config, shape, README_FILE) == 0
    assert gpu_activation_bytes(config, shape, torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("setting", "capability", "expected"),
    [("1", (9, 0), torch.bfloat16), ("1", (7, 5), torch.float32), ("0", (9, 0), torch.float32)],
)
def test_samples_pass_in_bfloat16_where_it_is_requested(
    setting: str,
    capability: tuple[int, int],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(products.BFLOAT16_SETTING, setting)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compute_dtype(README_FILE) == expected


def test_hessians_are_summed_without_tf32() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with exact_float32():
            assert matmul.fp32_precision == "ieee"
            assert not matmul.allow_bf16_reduced_precision_reduction
        assert matmul.fp32_precision == "tf32"
        assert matmul.allow_bf16_reduced_precision_reduction
    finally:
        matmul.fp32_precision = before
