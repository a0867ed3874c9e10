"""Schemes chosen for a size: the choice itself, what it is estimated from, and what is made of
it.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from error_parts import raises
from partial import contents, interrupted
from topology_cases import CASES, ENDS

import quantkit
from quantkit.architectures.families import FAMILIES
from quantkit.architectures.topology import group_fused_linears
from quantkit.base.json_values import Settings
from quantkit.bit_allocation.allocation import picture, units
from quantkit.bit_allocation.fit import Fit
from quantkit.bit_allocation.knapsack import ItemChoice, choose
from quantkit.bit_allocation.row_errors import row_errors
from quantkit.bit_allocation.size_target import CANDIDATES
from quantkit.data.files import EXCERPT
from quantkit.errors import RequestError, UnsupportedError
from quantkit.formats.detect import open_checkpoint
from quantkit.solver.gptq import Damped, solve
from quantkit.tensors.scheme import QuantScheme

GPTQ: dict[str, Any] = {
    "method": "gptq",
    "calibration": EXCERPT,
    "samples": 8,
    "length": 64,
    "source_check": False,
}
ALLOCATED = ("llama-biases", "gemma2", "phi3", "qwen2-moe", "gpt-oss")
G32, INT8 = QuantScheme(4, 32), QuantScheme(8, None)


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> quantkit.QuantizeResult:
    return quantkit.quantize(
        demo_model, tmp_path_factory.mktemp("fit") / "out", target_bits=4.5, **GPTQ
    )


def _pick(items: list[list[ItemChoice]], numbers: list[int]) -> list[ItemChoice]:
    return [choices[number] for choices, number in zip(items, numbers, strict=True)]


def test_the_choice_is_the_best_of_all() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        items = [
            [
                ItemChoice(rng.randrange(1, 40), rng.choice([0.0, rng.random()]))
                for _ in range(rng.randrange(1, 5))
            ]
            for _ in range(rng.randrange(1, 6))
        ]
        room = rng.randrange(150)
        losses = [
            sum(choice.loss for choice in choices)
            for choices in itertools.product(*items)
            if sum(choice.size for choice in choices) <= room
        ]
        exact = choose(items, room)
        coarse = choose(items, room, cells=8)
        if not losses:
            assert exact is coarse is None, seed
            continue
        assert exact is not None, seed
        assert coarse is not None, seed
        for numbers in (exact, coarse):
            assert sum(choice.size for choice in _pick(items, numbers)) <= room, seed
        loss = sum(choice.loss for choice in _pick(items, exact))
        assert loss == pytest.approx(min(losses)), seed


def test_of_equal_losses_the_smaller_is_taken() -> None:
    assert choose(
        [[ItemChoice(8, 1.0), ItemChoice(4, 1.0)], [ItemChoice(9, 0.0), ItemChoice(3, 0.0)]], 100
    ) == [
        1,
        1,
    ]


def _source(case: str, folder: Path) -> quantkit.StoredCheckpoint:
    kind, changes = CASES[case]
    return open_checkpoint(oracle.save(oracle.make(kind, **{**ENDS, **changes}), folder))


def test_predicted_errors_are_close_to_those_of_gptq() -> None:
    mixed = torch.randn(64, 64) @ torch.diag(torch.linspace(0.2, 3, 64))
    x, weight = torch.randn(4000, 64) @ mixed, torch.randn(96, 64)
    hessian = x.t() @ x / len(x)
    found = row_errors({"a": weight}, hessian.clone(), [G32, INT8], torch.float32, {"a": 96})["a"]
    for scheme in (G32, INT8):
        _, report = solve(weight, Damped.of_(hessian.clone()), scheme, torch.float32)
        assert found.errors[scheme].sum().item() == pytest.approx(
            report.error.sum().item(), rel=0.35
        )
    some = row_errors({"a": weight}, hessian.clone(), [G32], torch.float32, {"a": 24})["a"]
    gradients = torch.rand(96)
    assert len(some.rows) == 24
    assert some.loss(gradients, G32) == pytest.approx(found.loss(gradients, G32), rel=0.15)


@pytest.mark.parametrize("case", [*ALLOCATED, "deepseek-v3"])
def test_what_runtimes_fuse_is_one_unit(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    folder = oracle.save(oracle.make(kind, **{**ENDS, **changes}), tmp_path)
    config = FAMILIES[kind].read(Settings(json.loads((folder / "config.json").read_text()), folder))
    owner = {module: unit for unit in units(config) for module in unit.modules}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for modules in group_fused_linears(config, layer).values():
            assert len({owner[prefix + module].modules[0] for module in modules}) == 1
        experts = [module for module in owner if module.startswith(f"{prefix}mlp.experts.")]
        assert len({owner[module].modules[0] for module in experts}) <= 1
    assert sum(len(unit.modules) for unit in units(config)) == len(owner)


@pytest.mark.slow
def test_the_size_is_what_was_requested(made: quantkit.QuantizeResult) -> None:
    allocation = made.allocation
    assert allocation is not None
    linears = [one for one in made.manifest["modules"].items() if one[0] != "lm_head"]
    written = open_checkpoint(made.path)
    bits = weights = 0
    for module, reported in linears:
        rows, columns = written.info(f"{module}.weight").shape
        scheme = QuantScheme.parse(reported["scheme"])
        weights += rows * columns
        bits += rows * (columns * scheme.bits + 16 * scheme.groups(columns))
    assert 4.49 < bits / weights <= 4.5
    assert allocation.bits == pytest.approx(bits / weights, abs=1e-6)
    assert allocation.weight_bytes == (made.path / "model.safetensors").stat().st_size
    assert len(made.schemes) > 1
    assert made.manifest["bit_allocation"] == allocation.to_json()


def test_the_choice_is_reported(made: quantkit.QuantizeResult) -> None:
    assert made.allocation is not None
    lines = made.lines()
    assert lines[0].split() == [
        "layer",
        "q",
        "k",
        "v",
        "o",
        "gate",
        "up",
        "down",
        "KL",
        "x",
        "1e-4",
    ]
    (wrote,) = [index for index, line in enumerate(lines) if line.startswith("wrote ")]
    assert " 4.5 bits a weight: 4." in lines[wrote - 1]
    readme = (made.path / "README.md").read_text()
    assert "| layer | q k v | o | gate up | down | KL x 1e-4 |" in readme
    assert "--target-bits 4.5" in readme
    assert (made.path / "bit-allocation.svg").read_text() == picture(made.allocation)
    assert picture(made.allocation).count("<title>") == len(made.allocation.units) + 4
    inspected = quantkit.inspect(made.path)
    kl = (inspected.schemes_chosen or {})["estimated_kl"]
    assert inspected.schemes_chosen == {"target_bits": 4.5, "max_size": None, "estimated_kl": kl}
    assert any(line.endswith(f" {kl:g}") for line in inspected.lines())
    json.dumps(made.to_json())


@pytest.mark.slow
def test_files_of_weights_are_at_most_so_large(demo_model: Path, tmp_path: Path) -> None:
    dst, maximum = tmp_path / "out.gguf", 1_900_000
    made = quantkit.quantize(
        demo_model, dst, max_size=maximum, to="gguf", head="int8", keep="*.0.self_attn.*", **GPTQ
    )
    assert made.allocation is not None
    assert made.allocation.weight_bytes == dst.stat().st_size
    assert 0.98 * maximum < dst.stat().st_size <= maximum
    reported = made.manifest["modules"]
    assert reported["lm_head"]["scheme"] == "int8"
    assert reported["model.layers.0.self_attn.q_proj"]["scheme"] is None


@pytest.mark.slow
def test_a_resumed_run_keeps_its_choice(
    made: quantkit.QuantizeResult, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(src: Path, dst: Path, **options: Any) -> Any:
        def reported(phase: str, done: int, total: int, unit: str) -> None:
            if phase == "quantize":
                options["progress"](phase, done, total, unit)

        return quantkit.quantize(
            src, dst, target_bits=4.5, **{**GPTQ, **options, "progress": reported}
        )

    interrupted(
        job, demo_model, tmp_path / "out"
    )  # whose choice is the same, or the bytes would differ
    monkeypatch.setattr(
        "quantkit.bit_allocation.losses.estimate_losses",
        lambda *_, **__: pytest.fail("estimated anew"),
    )
    quantkit.quantize(demo_model, tmp_path / "out", target_bits=4.5, resume=True, **GPTQ)
    assert contents(tmp_path / "out") == contents(made.path)


@pytest.mark.parametrize(
    ("options", "error_type", "found", "expected"),
    [
        (
            {"target_bits": 3},
            RequestError,
            "3 bits a weight",
            "at least 4.125 bits a weight, and less than 16 ",
        ),
        ({"target_bits": 16}, RequestError, "16 bits a weight", "at least 4.125 bits"),
        (
            {"max_size": 10**5},
            RequestError,
            "100000 bytes (100 kB)",
            "at least 1467072 bytes (1.47 MB)",
        ),
        (
            {"max_size": 10**9},
            RequestError,
            "1000000000 bytes (1 GB)",
            "less than 2627904 bytes (2.63 MB)",
        ),
        ({"target_bits": 4.5, "to": "awq"}, UnsupportedError, "32 and 64 and 128", None),
        ({"target_bits": 4.5, "scheme": "int8"}, RequestError, None, None),
        ({"target_bits": 4.5, "max_size": 10**6}, RequestError, None, None),
        ({"target_bits": float("inf")}, RequestError, "inf", "such as 4.5"),
        ({"max_size": -1}, RequestError, "-1", None),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    options: dict[str, Any],
    error_type: type[quantkit.errors.QuantkitError],
    found: str | None,
    expected: str | None,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fit, "choose_allocation", lambda *_, **__: pytest.fail("has begun"))
    for function in (quantkit.quantize, quantkit.plan.quantize):
        with raises(error_type, expected or "", found=found):
            function(demo_model, tmp_path / "out", **{**GPTQ, **options})


def test_candidates_are_those_that_may_be_requested() -> None:
    names = [
        "q2_k",
        "q3_k",
        "iq4_xs",
        "int4-g128",
        "int4-g64",
        "int4-g32",
        "q4_k",
        "q5_0",
        "q5_k",
        "q6_k",
        "int8",
    ]
    assert [str(scheme) for scheme in CANDIDATES] == names
