"""The gate: what is too far from its source does not get its name."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command import Capture, run
from error_parts import raises
from paths import ROOT
from safetensors.torch import load_file, save_file
from schemes import any_scheme

import quantkit
from quantkit.base.messages import Option
from quantkit.calibration import group_solver
from quantkit.calibration.group_solver import Result
from quantkit.calibration.importance import input_importance
from quantkit.data.files import excerpt, gate_texts
from quantkit.errors import CheckpointError, NonFiniteError, QualityError
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.formats.folder import load_checked_tokenizer
from quantkit.quality import gate
from quantkit.quality.bounds import BOUNDS, weight_bound
from quantkit.quality.figures import Estimate
from quantkit.quality.gate import RtnBaseline, is_baseline
from quantkit.quality.measures import compare, text_windows
from quantkit.quality.verify import verify
from quantkit.solver.gptq import SingularError
from quantkit.tensors.qtensor import QuantTensor, Solver
from quantkit.tensors.recipe import Override, Recipe
from quantkit.tensors.scheme import SCHEMES, QuantScheme
from quantkit.tensors.tensor_slice import TensorSlice
from quantkit.text.tokenizer import load_tokenizer, prompt_start

_INT4 = QuantScheme.parse("int4-g64")
CALIBRATION = {"method": "gptq", "samples": 48, "length": 128}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(excerpt()[5000:])
    return path


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "quantkit.json").read_text())
    return manifest


@pytest.mark.slow
def test_what_loses_more_than_its_baseline_allows_is_stopped(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEMES, "int4", QuantScheme(4, None))  # whose baseline has groups of 128
    monkeypatch.setattr(gate, "SLACK", 0.5)
    dst = tmp_path / "int4"
    command = ["quantize", demo_model, dst, "--scheme", "int4", "--method", "rtn"]
    code, _, err = run(capfd, *command)
    assert code == 8
    assert "model.layers." in err
    assert "--accept-quality-loss" in err
    assert not dst.exists()

    code, _, err = run(capfd, *command, "--resume", "--accept-quality-loss")
    assert code == 0
    quality = _manifest(dst)["quality"]
    assert (quality["passed"], quality["accepted"]) == (False, True)
    assert any(text["kl"] > text["kl_bound"] for text in quality["texts"])
    # Whoever downloads the model reads that it failed its gate.
    assert "Not within its bound" in (dst / "README.md").read_text()
    code, _, err = run(capfd, "verify", dst)
    assert code == 8
    assert "--accept-quality-loss" in err


@pytest.mark.parametrize(
    "figures",
    [
        {"kl": math.nan},
        {"kl_bound": math.nan},
        {"perplexity": math.nan},
        {"perplexity": math.inf},
        {"perplexity": math.inf, "source_perplexity": math.inf},
    ],
)
def test_figures_that_are_no_numbers_do_not_pass(figures: dict[str, float]) -> None:
    one = gate.TextResult("speech", "0", 1, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0)
    assert gate.Gate([one], 1.25, {}, {}).problem() is None
    assert gate.Gate([replace(one, **figures)], 1.25, {}, {}).problem() is not None  # type: ignore[arg-type]
    assert gate.Gate([one], math.nan, {}, {}).problem() is not None


def test_errors_are_reported_and_missed_in_earlier_manifests() -> None:
    reported = gate.TextResult(
        "speech", "0", 512, 0.01234, 0.1, 1.0, 0.9, 50.0, 51.0, 0.00041, 0.0023
    )
    found = gate.Gate([reported], 1.25, {}, {})
    value = found.to_json(accepted=False)
    assert gate.Gate.from_json(value, Path("quantkit.json")) == found
    assert (str(reported.kl_estimate), str(reported.perplexity_ratio)) == (
        "0.0123 ± 0.0004",
        "1.0200 ± 0.0023",
    )
    for key in ("kl_error", "ratio_error"):
        del value["texts"][0][key]
    (earlier,) = gate.Gate.from_json(value, Path("quantkit.json")).texts
    assert earlier == replace(reported, kl_error=None, ratio_error=None)
    assert str(earlier.kl_estimate) == "0.0123"


@pytest.mark.slow
def test_a_layer_that_is_broken_after_it_was_solved_is_stopped_and_named(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    solve = group_solver.GroupSolver.solve

    def solve_and_break(
        self: group_solver.GroupSolver, linears: Any, *arguments: Any, **options: Any
    ) -> Any:
        results = solve(self, linears, *arguments, **options)
        calls.append(len(results))
        if len(calls) == 6:  # layer 1, output projection; its own check has passed
            ((name, result),) = results.items()
            order = torch.randperm(
                len(result.weight.codes), generator=torch.Generator().manual_seed(0)
            )
            weight = QuantTensor(
                result.weight.codes[order], result.weight.scale[order], None, result.weight.scheme
            )
            results[name] = Result.of(weight, linears[name].weight, result.record)
        return results

    monkeypatch.setattr(group_solver.GroupSolver, "solve", solve_and_break)
    with raises(QualityError, "model.layers.1.self_attn.o_proj (1."):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", calibration=text, **CALIBRATION)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    assert len(calls) > 6


@pytest.mark.slow
def test_a_layer_that_gptq_cannot_solve_is_rounded_and_stops_it(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def singular(weight: Any, *arguments: Any, **options: Any) -> Any:
        if weight.shape[1] == 384 and len(seen) < 1:
            seen.append(weight)
            raise SingularError("the Hessian stays singular")
        return real_solve(weight, *arguments, **options)

    seen: list[Any] = []
    real_solve = group_solver.solve
    monkeypatch.setattr(group_solver, "solve", singular)
    with raises(QualityError, "model.layers.0.mlp.down_proj", found="the Hessian stays singular"):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", calibration=text, **CALIBRATION)  # type: ignore[arg-type]
    quantkit.quantize(
        demo_model,
        tmp_path / "out",
        "int4-g64",
        calibration=text,
        resume=True,
        accept_quality_loss=True,
        **CALIBRATION,  # type: ignore[arg-type]
    )
    assert len(seen) == 1  # nothing was solved again
    manifest = _manifest(tmp_path / "out")
    assert manifest["quality"]["fallbacks"] == {
        "model.layers.0.mlp.down_proj": "the Hessian stays singular"
    }
    assert manifest["modules"]["model.layers.0.mlp.down_proj"]["solver"] == Solver.SEARCHED
    assert manifest["modules"]["model.layers.1.mlp.down_proj"]["solver"] == "gptq"


@pytest.mark.parametrize(
    ("bound", "limit", "limit_text"),
    [("kl", 1e-4, "at most 0.0001"), ("perplexity_ratio", 1.0001, "at most 1.0001 times")],
)
def test_the_bounds_hold_whatever_rounding_would_do(
    bound: str,
    limit: float,
    limit_text: str,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = replace(BOUNDS["int4"], **{bound: limit})
    monkeypatch.setitem(BOUNDS, "int4", tight)
    with raises(QualityError, expected=limit_text):
        quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", method="rtn")
    assert (tmp_path / "out.partial").is_dir()


@pytest.mark.slow
def test_the_figures_are_those_measured_apart(demo_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    quantkit.quantize(demo_model, folder, "int4-g64", method="rtn")
    tokenizer = load_tokenizer(demo_model)
    for one, (name, text) in zip(
        _manifest(folder)["quality"]["texts"], gate_texts().items(), strict=True
    ):
        windows = text_windows(tokenizer.encode(text), prompt_start(tokenizer), 256)[:2]
        found = compare(open_checkpoint(demo_model), [open_checkpoint(folder)], windows)[0]
        assert one["text"] == name
        assert one["tokens"] == 512
        assert one["kl"] == pytest.approx(found.divergence.kl, rel=1e-4)
        assert (one["kl_bound"], one["rounding_kl"]) == (
            BOUNDS["int4"].kl,
            None,
        )  # it is its own baseline
        assert one["perplexity"] == pytest.approx(found.perplexity, rel=1e-4)


def test_the_baseline_of_long_groups_is_groups_of_128(demo_model: Path) -> None:
    down = "model.layers.0.mlp.down_proj"
    source = open_checkpoint(demo_model)
    for given, expected in (
        ("int4", "int4-g128"),
        ("int4-g384", "int4-g128"),
        ("int4-g64", "int4-g64"),
        ("int8", "int8"),
    ):
        rounded = RtnBaseline(source, {down: any_scheme(given)})
        assert str(rounded.info(down + ".weight").scheme) == expected
        value = rounded.load(down + ".weight")
        assert isinstance(value, QuantTensor)
        assert str(value.scheme) == expected
        assert rounded.info("model.layers.1.mlp.down_proj.weight").scheme is None


class _Counting:
    """A checkpoint that counts how often each tensor is read whole, and how many rows otherwise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.reads: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, name: str, part: TensorSlice | None = None) -> Any:
        self.reads[name] += part is None
        self.rows[name] += 0 if part is None else part.size
        return self._inner.load(name, part)


def _records(folder: Path) -> dict[str, Any]:
    return {f"{module}.weight": facts for module, facts in _manifest(folder)["modules"].items()}


def _importance(folder: Path) -> Callable[[], dict[str, torch.Tensor]]:
    source = open_checkpoint(folder)
    return partial(input_importance, source, load_checked_tokenizer(source)[0])


@pytest.mark.slow
def test_rounding_reads_each_weight_once_to_compare_and_to_run_it_and_again_for_its_error(
    demo_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    quantkit.quantize(demo_model, folder, "int4-g64", method="rtn")
    source, result = _Counting(open_checkpoint(demo_model)), _Counting(open_checkpoint(folder))
    gate_result = gate.run_gate(
        source, result, _records(folder), importance=_importance(demo_model)
    )
    # Their errors are compared with those of plain rounding.
    rounded = {f"{module}.weight" for module in schemes(result)}
    for checkpoint in (source, result):
        assert checkpoint.reads == {name: 1 + (name in rounded) for name in checkpoint.names()}
        assert checkpoint.rows == {
            name: checkpoint.info(name).shape[0] for name in checkpoint.names()
        }
    assert gate_result.to_json(accepted=False) == _manifest(folder)["quality"]


@pytest.mark.slow
def test_gptq_reads_each_weight_once_and_the_source_for_its_baseline(
    demo_model: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    quantkit.quantize(demo_model, folder, "int4-g64", calibration=text, **CALIBRATION)  # type: ignore[arg-type]
    source, result = _Counting(open_checkpoint(demo_model)), _Counting(open_checkpoint(folder))
    gate.run_gate(source, result, _records(folder))
    solved = {
        f"{module}.weight" for module in schemes(result)
    }  # whose errors are held against those of rounding
    assert result.reads == {name: 1 + (name in solved) for name in result.names()}
    assert source.reads == {name: 2 + (name in solved) for name in source.names()}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4-g64", "int4-g32-asym"])
def test_a_baseline_that_is_not_run_would_give_the_same_figures(
    scheme: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    quantkit.quantize(demo_model, folder, scheme, method="rtn", accept_quality_loss=True)
    ran: list[int] = []
    tallies = gate.collect_tallies

    def compared(reference: Any, others: Any, *rest: Any, **options: Any) -> Any:
        ran.append(len(others))
        return tallies(reference, others, *rest, **options)

    monkeypatch.setattr(gate, "collect_tallies", compared)
    source, result, records = open_checkpoint(demo_model), open_checkpoint(folder), _records(folder)
    short = gate.run_gate(source, result, records, importance=_importance(demo_model))
    monkeypatch.setattr(gate, "is_baseline", lambda *_: False)
    long = gate.run_gate(source, result, records)
    assert [replace(one, kl_bound=0.0, rounding_kl=None) for one in long.texts] == [
        replace(one, kl_bound=0.0) for one in short.texts
    ]
    # The baseline of bounds is rounded on the scales that span each group, and int4 on better ones.
    ratios = [one.kl / one.rounding_kl for one in long.texts]
    assert ratios == [1.0] * len(ratios) if scheme == "int8" else sum(ratios) < 0.98 * len(ratios)
    assert all(one.kl_bound >= one.kl for one in long.texts)
    assert (long.problem(), short.problem()) == (None, None)
    assert ran == [1, 2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "damage", ["codes", "one code", "scale", "solver", "fallback", "scheme", "kept"]
)
def test_a_result_that_is_not_its_baseline_is_reported(
    damage: str, demo_model: Path, tmp_path: Path
) -> None:
    quantkit.quantize(demo_model, tmp_path / "out", "int8")
    records = _records(tmp_path / "out")
    name, kept = "model.layers.2.mlp.down_proj.weight", "model.layers.1.input_layernorm.weight"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    source = open_checkpoint(demo_model)
    baseline = RtnBaseline(source, schemes(open_checkpoint(tmp_path / "out")))
    assert is_baseline(open_checkpoint(tmp_path / "out"), baseline, records)
    if damage == "codes":
        tensors[name + "_packed"] = tensors[name + "_packed"].flip(0)
    elif damage == "one code":
        tensors[name + "_packed"][77, 3] ^= 4
    elif damage == "scale":
        tensors[name + "_scale"] *= 2
    elif damage == "kept":
        tensors[kept] *= 2
    elif damage == "scheme":
        baseline = RtnBaseline(
            source, dict.fromkeys(schemes(open_checkpoint(tmp_path / "out")), _INT4)
        )
    else:
        records[name] = {**records[name], damage: "gptq"}
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert not is_baseline(open_checkpoint(tmp_path / "out"), baseline, records)


def test_scales_of_another_type_than_the_source_are_not_its_baseline(tmp_path: Path) -> None:
    """A source of mixed types: what counts is each tensor's own."""
    source = oracle.save(oracle.make("llama"), tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if "mlp" in name:
            tensors[name] = tensors[name].bfloat16()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    quantkit.quantize(source, tmp_path / "out", "int8", accept_quality_loss=True)
    opened, result = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    baseline = RtnBaseline(opened, schemes(result))
    assert is_baseline(result, baseline, _records(tmp_path / "out"))
    for name in result.names():
        assert baseline.info(name).dtype == result.info(name).dtype
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name in tensors:
        if name.endswith("down_proj.weight_scale"):
            tensors[name] = tensors[name].half()
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert not is_baseline(open_checkpoint(tmp_path / "out"), baseline, _records(tmp_path / "out"))


def test_what_was_only_rounded_does_not_look_nearly_failed(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", method="rtn")
    for line in verify(tmp_path / "out").lines()[1:3]:
        assert line.endswith(" 0.25)")


@pytest.mark.slow
def test_gptq_is_reported_next_to_rounding(demo_model: Path, text: Path, tmp_path: Path) -> None:
    quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", calibration=text, **CALIBRATION)  # type: ignore[arg-type]
    for record, line in zip(
        _manifest(tmp_path / "out")["quality"]["texts"],
        verify(tmp_path / "out").lines()[1:3],
        strict=True,
    ):
        assert record["kl_bound"] == pytest.approx(gate.SLACK * record["rounding_kl"], rel=1e-3)
        assert f" {record['kl_bound']:.3g};" in line
        assert line.endswith(f" {record['rounding_kl']:.3g})")
        assert f" {Estimate(record['kl'], record['kl_error'])} " in line


@pytest.mark.slow
def test_a_fine_layer_may_make_up_for_coarse_ones(
    demo_model: Path, text: Path, tmp_path: Path
) -> None:
    """GPTQ solves it for the inputs that they give, which moves it further than its own steps
    are.
    """
    recipe = Recipe(
        QuantScheme.parse("int4-g64"), (Override("*.down_proj", QuantScheme.parse("int8")),)
    )
    made = quantkit.quantize(
        demo_model, tmp_path / "q", recipe, method="gptq", calibration=text, samples=24, length=128
    )
    assert made.quality.problem() is None
    moved = made.manifest["modules"]["model.layers.2.mlp.down_proj"]["relative_error"]
    pair = open_checkpoint(tmp_path / "q"), open_checkpoint(demo_model)
    quantized, weight = (one.load("model.layers.2.mlp.down_proj.weight") for one in pair)
    assert moved > weight_bound(quantized, weight, quantized.scheme)
    assert verify(demo_model, tmp_path / "q").ok
    assert quantkit.verify(tmp_path / "q").ok


@pytest.mark.slow
def test_a_rounded_layer_has_nothing_to_make_up_for(demo_model: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        QuantScheme.parse("int4-g64"), (Override("*.down_proj", QuantScheme.parse("int8")),)
    )
    quantkit.quantize(demo_model, tmp_path / "q", recipe, method="rtn")
    bounds = {one.name: one.bound for one in verify(demo_model, tmp_path / "q").differing}
    assert (
        bounds["model.layers.2.mlp.down_proj.weight"]
        < 0.05
        < bounds["model.layers.2.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("modules", [[], None, {"model.layers.2.mlp.down_proj": 5}])
def test_a_manifest_that_reports_nothing_of_layers_is_no_obstacle(
    modules: Any, demo_model: Path, made_int8: Path, tmp_path: Path
) -> None:
    other = oracle.copy(made_int8, tmp_path / "other")
    oracle.edit_json(other / "quantkit.json", modules=modules)
    assert verify(demo_model, other).ok


def test_a_figure_just_beyond_its_bound_is_reported_with_the_digits_that_show_it() -> None:
    text_result = gate.TextResult("speech", "0", 1, 0.25004, 0.0, 0.25, 1.0, 2.0, 2.0)
    problem = gate.Gate([text_result], 1.25, {}, {}).problem()
    assert problem is not None
    assert " 0.25004 " in problem[1]
    assert problem[2].endswith(" 0.25")
    near = replace(text_result, kl=0.0, perplexity=2.5002)
    problem = gate.Gate([near], 1.25, {}, {}).problem()
    assert problem is not None
    assert problem[1].startswith("1.2501 ")
    assert " 1.25 " in problem[2]


@pytest.mark.parametrize(
    ("rounding", "is_rounded", "methods"),
    [(0.01, False, {"rtn"}), (0.03, False, set()), (None, True, {"gptq"}), (0.01, True, {"gptq"})],
)
def test_the_method_that_may_help_is_named(
    rounding: float | None,
    is_rounded: bool,
    methods: set[str],
    demo_model: Path,
    made_int8: Path,
    tmp_path: Path,
) -> None:
    text_result = gate.TextResult(
        "speech", "0", 1, 5.0, 0.0, 0.02, 1.0, 2.0, 2.0, rounding_kl=rounding
    )
    pair = open_checkpoint(demo_model), open_checkpoint(made_int8)
    measured = gate.Gate([text_result], 1.25, {}, {}, is_rounded)
    with pytest.raises(QualityError) as raised:
        gate.require_passed(measured, *pair, tmp_path)
    hint = raised.value.message
    options = [part for part in hint.parts if isinstance(part, Option)]
    assert {option.value for option in options if option.name == "method"} == methods
    assert "accept_quality_loss" in {option.name for option in options}


@pytest.mark.parametrize("rounding", [{}, {"rounding_kl": None}, {"rounding_kl": 0.2}])
def test_a_manifest_may_say_nothing_of_rounding(
    rounding: dict[str, float | None], made_int8: Path, tmp_path: Path
) -> None:
    def edit(quality: dict[str, Any]) -> None:
        for text in quality["texts"]:
            del text["rounding_kl"]
            text |= rounding

    lines = verify(_edited(made_int8, tmp_path / "out", edit)).lines()
    assert all((" 0.2)" in line) == bool(rounding.get("rounding_kl")) for line in lines[1:3])


@pytest.mark.slow
def test_verify_measures_again(demo_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    quantkit.quantize(demo_model, folder, "int8")
    lines = verify(folder).lines()
    assert len(lines) == 4
    assert "'speech'" in lines[1]
    manifest = _manifest(folder)
    manifest["quality"]["texts"][1]["perplexity"] *= 1.02
    recorded = manifest["quality"]["texts"][1]["perplexity"]
    (folder / "quantkit.json").write_text(json.dumps(manifest))
    with raises(QualityError, "'mixed'", path=folder, expected=f"{recorded:.4g}"):
        verify(folder)
    manifest["quality"]["texts"][1]["sha256"] = "0" * 64
    (folder / "quantkit.json").write_text(json.dumps(manifest))
    (line,) = [line for line in verify(folder).lines() if "'mixed'" in line]
    assert "perplexity" not in line


@pytest.fixture(scope="module")
def made_int8(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "out"
    quantkit.quantize(demo_model, folder, "int8")
    return folder


def _edited(made: Path, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A folder like another, but for the gate's part of the manifest."""
    shutil.copytree(made, folder)
    content = _manifest(made)
    edit(content["quality"])
    (folder / "quantkit.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kl", math.nan),
        ("kl", math.inf),
        ("kl_bound", math.nan),
        ("kl_bound", 0.0),
        ("perplexity", math.nan),
        ("perplexity", math.inf),
        ("perplexity", 0.0),
        ("source_perplexity", math.nan),
        ("source_perplexity", 0.0),
    ],
)
def test_verify_takes_no_figure_that_cannot_be(
    key: str, value: float, made_int8: Path, tmp_path: Path
) -> None:
    folder = _edited(
        made_int8, tmp_path / "out", lambda quality: quality["texts"][1].update({key: value})
    )
    with pytest.raises((QualityError, CheckpointError)):
        verify(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda quality: quality["texts"].clear(),
        lambda quality: quality["texts"][0].pop("kl"),
        lambda quality: quality["texts"][0].update(perplexity="low"),
        lambda quality: quality["texts"][0].update(tokens=math.inf),
        lambda quality: quality["texts"].append(None),
        lambda quality: quality.update(texts=None),
        lambda quality: quality.update(fallbacks=1),
        lambda quality: quality.update(distorted=1),
        lambda quality: quality.update(distorted={"a": [1.0]}),
        lambda quality: quality.clear(),
    ],
)
def test_verify_refuses_a_manifest_that_does_not_report_of_a_gate(
    edit: Callable[[dict[str, Any]], object], made_int8: Path, tmp_path: Path
) -> None:
    folder = _edited(made_int8, tmp_path / "out", edit)
    with raises(CheckpointError, path=folder / "quantkit.json"):
        verify(folder)


def test_verify_misses_the_gate_of_a_quantized_model(made_int8: Path, tmp_path: Path) -> None:
    folder = _edited(made_int8, tmp_path / "out", lambda quality: None)
    content = _manifest(folder)
    del content["quality"]
    (folder / "quantkit.json").write_text(json.dumps(content))
    with raises(CheckpointError, path=folder / "quantkit.json"):
        verify(folder)


def test_verify_reports_a_gate_that_was_not_passed(made_int8: Path, tmp_path: Path) -> None:
    folder = _edited(made_int8, tmp_path / "out", lambda quality: quality.pop("passed"))
    with raises(QualityError, path=folder):
        verify(folder)


def test_verify_reports_a_rounded_layer_that_nobody_accepted(
    made_int8: Path, tmp_path: Path
) -> None:
    folder = _edited(
        made_int8,
        tmp_path / "out",
        lambda quality: quality["fallbacks"].update({"a.b": "singular"}),
    )
    with raises(QualityError, "'a.b'", path=folder, found="singular"):
        verify(folder)


def test_a_model_without_tokenizer_is_measured_on_random_tokens(tmp_path: Path) -> None:
    source = oracle.save(oracle.make("llama"), tmp_path / "m")
    quantkit.quantize(source, tmp_path / "out", "int8")
    (recorded,) = _manifest(tmp_path / "out")["quality"]["texts"]
    assert recorded["text"] == "random tokens"
    assert recorded["tokens"] == 2 * 64
    tokens = torch.randint(oracle.VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))
    assert recorded["sha256"] == hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    measured_line = verify(tmp_path / "out").lines()[1]
    assert f"{recorded['perplexity']:.4g}" in measured_line
    other = _edited(
        tmp_path / "out", tmp_path / "other", lambda quality: quality["texts"][0].update(sha256="")
    )
    assert verify(other).lines()[1] != measured_line


def test_a_model_whose_logits_are_not_finite_is_stopped(tmp_path: Path) -> None:
    model = oracle.make("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
    source = oracle.save(model, tmp_path / "m")
    with raises(NonFiniteError, path=source):
        quantkit.quantize(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_the_slack_in_the_docs_is_that_of_the_gate() -> None:
    page = " ".join((ROOT / "docs/errors.md").read_text().split())
    assert f"no more than {gate.SLACK} times" in page
    assert f"below {gate.FLOOR} always" in page
