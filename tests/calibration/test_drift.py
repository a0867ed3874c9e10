"""What is done about the drift between the quantized model and the float one: how much, and how far it is believed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.calibration import effort as effort_module
from quantkit.calibration import group_solver
from quantkit.calibration.effort import EFFORTS, followed_share
from quantkit.calibration.group_solver import GroupSolver
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.distributed.group import SINGLE
from quantkit.tensors.scheme import QuantScheme

WIDTH = 64
INT8 = QuantScheme.parse("int8")


def _solved(weight: Tensor, inputs: Tensor, drift: Tensor) -> Tensor:
    """What a layer [O, I] becomes where the float model's inputs are so far from those of this one."""
    linear = nn.Linear(WIDTH, len(weight), bias=False)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    statistics = HessianAccumulator(WIDTH, WIDTH, torch.device("cpu"))
    statistics.add_pair(inputs, drift)
    solver = GroupSolver({"layer": INT8}, torch.float32, SINGLE)
    return solver.solve({"layer": linear}, statistics, outputs=False)["layer"].weight.dequantize()


def test_drift_that_few_tokens_show_is_taken_for_noise() -> None:
    weight = torch.randn(32, WIDTH)

    def change(tokens: int) -> float:
        found = _solved(weight, torch.randn(tokens, WIDTH), torch.randn(tokens, WIDTH))
        return ((found - weight).norm() / weight.norm()).item()

    assert change(2 * WIDTH) < 0.5
    assert change(100 * WIDTH) < 0.2


def test_drift_that_many_tokens_show_is_made_up_for() -> None:
    weight, inputs = torch.randn(32, WIDTH), torch.randn(100 * WIDTH, WIDTH)
    drifting = 0.1 * torch.randn(WIDTH, WIDTH)
    found = _solved(weight, inputs, inputs @ drifting)
    wanted = weight + weight @ drifting.t()
    assert (found - wanted).norm() < 0.15 * (weight - wanted).norm()


def test_damping_counts_the_tokens_that_show_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def damping(inputs: int, tokens: int) -> float:
        requested.append((inputs, tokens))
        return 0.1

    monkeypatch.setattr(group_solver, "drift_damping", damping)
    _solved(torch.randn(32, WIDTH), torch.randn(300, WIDTH), torch.randn(300, WIDTH))
    assert requested == [(WIDTH, 300)]


@pytest.mark.parametrize(("inner", "standard"), [(512, 4), (1024, 4), (1025, 8), (5632, 8)])
def test_half_is_followed_where_tokens_are_few_for_the_width(
    inner: int, standard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort_module, "inner_width", lambda config: inner)
    config: ModelConfig = SimpleNamespace()
    shape = 64, 128
    assert EFFORTS["default"].for_samples(config, shape).stride == standard
    assert EFFORTS["thorough"].for_samples(config, shape) == EFFORTS["thorough"]
    assert EFFORTS["default"].for_samples(config, (256, 128)).stride == (8 if inner == 5632 else 4)
    monkeypatch.setattr(effort_module, "batch_samples", lambda config, length: 1)
    assert followed_share(config, shape, EFFORTS["default"].for_samples(config, shape)) == 1 / standard
