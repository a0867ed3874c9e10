"""What is done about the drift between the quantized model and the float one: how much, and how
far it is believed.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quantkit
from quantkit.architectures.config import ModelConfig
from quantkit.calibration import effort as effort_module
from quantkit.calibration import group_solver
from quantkit.calibration.effort import EFFORTS, compute_float_share
from quantkit.calibration.group_solver import GroupSolver, Result
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.data.files import DEMO_MODEL
from quantkit.distributed.group import SINGLE
from quantkit.tensors.scheme import QuantScheme

WIDTH = 64
INT8 = QuantScheme.parse("int8")


def _solved(weight: Tensor, inputs: Tensor, drift: Tensor) -> Tensor:
    """What a layer [O, I] becomes where the float model's inputs are so far from those of this
    one.
    """
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
    assert (
        compute_float_share(config, shape, EFFORTS["default"].for_samples(config, shape))
        == 1 / standard
    )


def _solve_bounded(weight: Tensor, inputs: Tensor, drift: Tensor) -> Result:
    """Solve one int8 layer [O, I] with the bound on its error."""
    linear = nn.Linear(WIDTH, len(weight), bias=False)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    statistics = HessianAccumulator(WIDTH, WIDTH, torch.device("cpu"))
    statistics.add_pair(inputs, drift)
    solver = GroupSolver({"layer": INT8}, torch.float32, SINGLE)
    return solver.solve({"layer": linear}, statistics, outputs=False, bounded=True)["layer"]


def test_a_drift_beyond_the_bound_of_the_weights_is_ignored() -> None:
    """Outlier channels amplify the errors of earlier layers: the gate refused int8 and q6_k models,
    although their KL was lower than by rounding.
    """
    weight, inputs = torch.randn(32, WIDTH), torch.randn(100 * WIDTH, WIDTH)
    drift = inputs @ (0.1 * torch.randn(WIDTH, WIDTH))
    result = _solve_bounded(weight, inputs, drift)
    assert result.error < 0.02
    assert result.record["solver"] == "gptq"
    assert re.fullmatch(
        r"ignored: .* [\d.]+, expected at most 0\.0\d+",
        result.record["drift"],
    )


def test_a_drift_within_the_bound_of_the_weights_is_made_up_for() -> None:
    weight, inputs = torch.randn(32, WIDTH), torch.randn(100 * WIDTH, WIDTH)
    small_change = 0.001 * torch.randn(WIDTH, WIDTH)
    result = _solve_bounded(weight, inputs, inputs @ small_change)
    wanted = weight + weight @ small_change.t()
    assert "drift" not in result.record
    assert (result.weight.dequantize() - wanted).norm() < (weight - wanted).norm()


def test_a_linear_that_gptq_changes_beyond_its_bound_is_rounded() -> None:
    """One input that is much larger than all others takes their weights far from int8's nearest
    codes.
    """
    weight, inputs = torch.randn(32, WIDTH), torch.randn(4 * WIDTH, WIDTH)
    inputs[:, 5] *= 1e4
    result = _solve_bounded(weight, inputs, torch.zeros_like(inputs))
    assert result.error < 0.02
    assert "GPTQ" in result.record["rounding_reason"]


@pytest.mark.slow
def test_a_model_with_outlier_channels_passes_the_gate(tmp_path: Path) -> None:
    source = quantkit.convert(DEMO_MODEL, tmp_path / "source", to="hf").path
    (source / "quantkit.json").unlink()
    tensors = load_file(source / "model.safetensors")
    for (
        name,
        tensor,
    ) in tensors.items():  # a channel is large in the norm's output, and its weights are small
        if "input_layernorm" in name:
            tensor[7] *= 1000
        if re.search("[qkv]_proj", name):
            tensor[:, 7] /= 1000
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    result = quantkit.quantize(
        source, tmp_path / "out", scheme="int8", method="gptq", samples=16, length=128
    )
    modules = result.manifest["modules"].values()
    assert any("drift" in module for module in modules)
    assert quantkit.verify(result.path).ok
