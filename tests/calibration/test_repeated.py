"""Linears that a forward pass uses several times, solved on the inputs of all their uses."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
import torch
from error_parts import raises
from partial import contents
from solved_streams import CPU, record_hessians
from stored_codes import codes
from torch import Tensor

import quantkit
from quantkit.calibration import gptq_quantizer
from quantkit.calibration.effort import EFFORTS
from quantkit.calibration.group_solver import GroupSolver
from quantkit.calibration.repeated import solve_repeated
from quantkit.calibration.sample_streams import Batches
from quantkit.distributed.group import SINGLE
from quantkit.errors import UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.jobs.output.writer import Writer
from quantkit.passes.activation_store import ActivationStore
from quantkit.passes.passage import Passage
from quantkit.tensors.scheme import QuantScheme
from quantkit.via_transformers.lazy_model import LazyModel
from quantkit.via_transformers.sites import find_sites

Tiny = Callable[[str], Path]
KIND = "hrm_text"
INT8 = QuantScheme.parse("int8")
TOKENS = oracle.random_tokens(24, batch=6, vocabulary=2000)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_the_hessian_is_that_of_all_uses_however_many_are_summed_at_a_time(
    memory_bytes: int, tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(KIND)
    inputs_of_module: dict[str, list[Tensor]] = defaultdict(list)
    model = oracle.load(folder)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: inputs_of_module[name].append(inputs[0].flatten(0, 1))
            )
    oracle.logits(model, TOKENS)

    lazy = LazyModel(open_checkpoint(folder, tensors_only=True))
    passage = Passage(lazy, folder)
    linears = [name.removesuffix(".weight") for name in lazy.targets if "_proj" in name]
    sites, _ = find_sites(lazy, linears)
    groups = passage.survey(sites, TOKENS[:1]).groups
    batches = Batches.of(TOKENS, slice(len(TOKENS)), 2, EFFORTS["default"], CPU)
    hessians = record_hessians(monkeypatch)
    with torch.no_grad():
        solved = list(
            solve_repeated(
                passage,
                groups,
                batches,
                GroupSolver(dict.fromkeys(linears, INT8), torch.float32, SINGLE),
                store=ActivationStore(),
                memory_bytes=memory_bytes,
            )
        )
    assert [group for group, _ in solved] == list(groups)
    for (group, results), hessian in zip(solved, hessians, strict=True):
        assert results.keys() == {linear for site in group.sites for linear, _, _ in site.rows}
        for site in group.sites:
            uses = inputs_of_module[site.module]
            assert len(uses) > 1
            rows = torch.cat(uses)
            torch.testing.assert_close(hessian, rows.t() @ rows, rtol=1e-4, atol=1e-3)
    assert not lazy.loaded


def _quantize(source: Path, dst: Path, **options: Any) -> quantkit.QuantizeResult:
    settings: dict[str, Any] = {"samples": 16, "length": 64, "source_check": False, **options}
    return quantkit.quantize(source, dst, via="transformers", **settings)


def test_what_follows_gets_the_states_of_the_quantized_model(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[Tensor] = []

    def watch(passage: Any, groups: Any, batches: Batches, *others: Any, **settings: Any) -> Any:
        # The float model's passes have the same tokens.
        samples.extend(itertools.compress(batches.tokens, map(operator.not_, batches.is_float)))
        return solve_repeated(passage, groups, batches, *others, **settings)

    monkeypatch.setattr(gptq_quantizer, "solve_repeated", watch)
    hessians = record_hessians(monkeypatch)
    result = _quantize(tiny_model(KIND), tmp_path / "gptq", scheme="int4-g32", head="int8")
    dequantized = quantkit.convert(
        result.path, tmp_path / "floats", dequantize=True, source_check=False
    )
    states: list[Tensor] = []
    model = oracle.load(dequantized.path)
    model.lm_head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    for batch in samples:
        oracle.logits(model, batch)
    rows = torch.cat(states).flatten(0, 1)
    # The head is the last that is solved.
    torch.testing.assert_close(hessians[-1], rows.t() @ rows, rtol=1e-3, atol=1e-2)


def test_a_run_that_was_interrupted_after_them_gets_the_same_bytes(
    tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"scheme": "int4-g32", "head": "int8"}
    _quantize(tiny_model(KIND), tmp_path / "whole", **settings)
    record = Writer.record_safe_point
    solve = GroupSolver.solve
    safe_points = itertools.count(1)
    solved: list[str] = []

    def stop(self: Writer) -> None:
        record(self)
        # After the embedding and the blocks of one of both stacks.
        if next(safe_points) == 3:
            raise KeyboardInterrupt

    def watch(self: GroupSolver, linears: Any, *arguments: Any, **options: Any) -> Any:
        solved.extend(linears)
        return solve(self, linears, *arguments, **options)

    monkeypatch.setattr(Writer, "record_safe_point", stop)
    with pytest.raises(KeyboardInterrupt):
        _quantize(tiny_model(KIND), tmp_path / "resumed", **settings)
    monkeypatch.undo()
    monkeypatch.setattr(GroupSolver, "solve", watch)
    result = _quantize(tiny_model(KIND), tmp_path / "resumed", resume=True, **settings)
    assert 0 < len(solved) < sum(result.schemes.values())
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.processes
def test_processes_of_which_one_has_no_samples_make_what_one_makes(
    tiny_model: Tiny, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"samples": 2, "length": 256, "accept_quality_loss": True}
    _quantize(tiny_model(KIND), tmp_path / "one", scheme="int4-g32", method="gptq", **options)
    command = ["quantize", tiny_model(KIND), tmp_path / "three", "--scheme", "int4-g32"]
    command += ["--via", "transformers", "--method", "gptq"]
    command += ["--accept-quality-loss", "--no-source-check"]
    for name in ("samples", "length"):
        command += [f"--{name}", str(options[name])]
    done = forked.group(3, forked.COMMAND, *command)
    assert [process.returncode for process in done] == [0] * 3, done[0].stderr
    expected, shared = (codes(tmp_path / name) for name in ("one", "three"))
    assert shared.keys() == expected.keys()
    for module, weight in expected.items():
        assert (weight.codes != shared[module].codes).float().mean() < 0.01, module


def test_their_schemes_are_not_chosen(tiny_model: Tiny, tmp_path: Path) -> None:
    with raises(UnsupportedError, "several times"):
        _quantize(tiny_model(KIND), tmp_path / "dst", target_bits=5.0)
    assert not list(tmp_path.iterdir())
