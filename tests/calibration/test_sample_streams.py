"""Samples that pass through a model while its linears are solved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from solved_streams import CPU, solve_streams
from torch import Tensor, nn

from quantkit.calibration import sample_streams
from quantkit.calibration.effort import EFFORTS
from quantkit.calibration.group_solver import GroupSolver
from quantkit.calibration.hessian import HessianAccumulator
from quantkit.calibration.sample_streams import Batches, multiply
from quantkit.formats.detect import open_checkpoint
from quantkit.model.load import load_model
from quantkit.tensors.products import bfloat16_linear
from quantkit.tensors.scheme import QuantScheme

INT8 = QuantScheme.parse("int8")
QUERIES = "model.layers.0.self_attn.q_proj"
OUTPUTS = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_solver_has_float32_weights_and_samples_are_multiplied_by_narrow_ones(
    dtype: torch.dtype, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(demo_model)
    solved: dict[str, torch.dtype] = {}
    multiplied: set[torch.dtype] = set()
    solve = GroupSolver.solve

    def watch_solve(
        self: GroupSolver, linears: Mapping[str, nn.Linear], *arguments: Any, **named: Any
    ) -> Any:
        for name, linear in linears.items():
            solved[name] = linear.weight.dtype
            weight = source.load(f"{name}.weight")
            assert isinstance(weight, Tensor)
            assert torch.equal(linear.weight, weight.float())
        return solve(self, linears, *arguments, **named)

    def watch_multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        multiplied.add(weight.dtype)
        return multiply(x, weight, bias)

    monkeypatch.setattr(GroupSolver, "solve", watch_solve)
    monkeypatch.setattr(sample_streams, "multiply", watch_multiply)
    tokens = oracle.random_tokens(32, batch=8, vocabulary=2048)
    # The value projection has no scheme, but is multiplied in the same dtype.
    solve_streams(source, tokens, {QUERIES: INT8, OUTPUTS: INT8}, compute_dtype=dtype)
    assert solved == {QUERIES: torch.float32, OUTPUTS: torch.float32}
    assert multiplied == {dtype}


def test_a_product_is_rounded_as_its_weight_is() -> None:
    x = torch.randn(2, 3, 64)
    weight = torch.randn(32, 64)
    bias = torch.randn(32)
    torch.testing.assert_close(multiply(x, weight, bias), x @ weight.t() + bias)
    narrow = multiply(x, weight.bfloat16())
    assert torch.equal(narrow, bfloat16_linear(x, weight.bfloat16()))
    assert multiply(x[:, :0], weight).shape == (2, 0, 32)


def test_the_drift_is_the_float_model_minus_the_quantized(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(demo_model)
    drifts: list[Tensor] = []
    release = HessianAccumulator.release

    def watch(self: Any, group: Any) -> Any:
        sums = release(self, group)
        drifts.append(sums[2].clone())
        return sums

    monkeypatch.setattr(HessianAccumulator, "release", watch)
    tokens = oracle.random_tokens(64, batch=4, vocabulary=2048)
    coarse = QuantScheme.parse("int4-g64")
    modules = {f"model.layers.0.self_attn.{name}": coarse for name in ("v_proj", "o_proj")}
    results = solve_streams(source, tokens, modules, effort=EFFORTS["thorough"])
    # By its modules, which the test watches.
    decoder = load_model(source, dtype=torch.float32, device="cpu", backend="reference")
    block: Any = decoder.model.layers[0]
    mixed: list[Tensor] = []
    with torch.inference_mode():
        block.self_attn.o_proj.register_forward_pre_hook(lambda _, args: mixed.append(args[0]))
        decoder(tokens)
        replaced = results["model.layers.0.self_attn.v_proj"].weight.dequantize()
        block.self_attn.v_proj.weight.copy_(replaced)
        decoder(tokens)
    floats, quantized = (inputs.flatten(0, 1) for inputs in mixed)
    weight = source.load(f"{OUTPUTS}.weight")
    assert isinstance(weight, Tensor)
    expected = ((floats - quantized) @ weight.float().t()).t() @ quantized
    # Before the first quantized linear, both models are the same.
    assert not drifts[0].any()
    torch.testing.assert_close(drifts[1], expected, rtol=1e-3, atol=1e-3)


def test_batches_go_through_the_float_model_right_after_the_quantized_one() -> None:
    samples = torch.arange(20 * 3).view(20, 3)
    batches = Batches.of(samples, slice(4, 20), 2, EFFORTS["default"], CPU)
    assert list(batches.is_float) == [False, True, False] * 4
    assert [batches.is_paired(index) for index in range(12)] == [True, False, False] * 4
    assert torch.equal(torch.cat([batches.tokens[0], batches.tokens[2]]), samples[4:8])
    assert torch.equal(batches.tokens[0], batches.tokens[1])
    assert batches.total_tokens == 60


def test_a_process_without_samples_has_a_pass_that_does_not_count() -> None:
    samples = torch.arange(6).view(2, 3)
    batches = Batches.of(samples, slice(2, 2), 2, EFFORTS["default"], CPU)
    assert batches.is_ghost
    assert torch.equal(batches.tokens[0], samples[:1])
    assert batches.total_tokens == 6
