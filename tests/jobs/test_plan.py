"""`quantkit plan`: the same checks and arguments, and figures that hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
from command import Capture, run

import quantkit
from quantkit.base import memory
from quantkit.base.cgroups import MemoryLimit
from quantkit.base.memory import size_text
from quantkit.bit_allocation.losses import CHOICE
from quantkit.calibration import data
from quantkit.cli.main import quantkit as root
from quantkit.data.files import excerpt
from quantkit.jobs.output.sizes import WeightSizes
from quantkit.jobs.quantize.rounding_probe import PROBE
from quantkit.text.tokenizer import Tokenizer
from quantkit.training.training import TRAINING

ROWS = 2048  # of the demo model's embedding
GPTQ = ["--method", "gptq", "--samples", "60", "--length", "256"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(excerpt())
    return path


MEASURED = r"""
import os, re, sys
from pathlib import Path
from quantkit.cli.main import main

def done(*arguments):
    try:
        main(arguments)
    except SystemExit as stop:
        assert not stop.code

done("plan", *sys.argv[2:], "--json", "-")
assert not os.listdir(sys.argv[1])
done(*sys.argv[2:])
print(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
"""  # of the process itself: what the system reports to its parent begins with the parent's own


def _measured(empty: Path, *arguments: str | Path) -> tuple[dict[str, Any], int]:
    """What is planned for one command, and its peak memory in bytes; planning leaves a folder
    empty.
    """
    command = [sys.executable, "-c", MEASURED, str(empty), *map(str, arguments)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    forecast, _ = json.JSONDecoder().raw_decode(out)
    return forecast, 1024 * int(out.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak"
)
@pytest.mark.parametrize("kind", ["convert", "cast", "shards", "rtn", "gptq", "experts"])
def test_memory_and_disk_are_within_a_fifth_of_what_happens(
    kind: str,
    demo_model: Path,
    text: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    dst = tmp_path / "out"
    moe = tmp_path_factory.mktemp("moe") / "model"
    if kind == "experts":  # wide enough for its sums to count, and with a layer that has none
        sizes = {
            "hidden_size": 1024,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
            "num_hidden_layers": 2,
        }
        experts = {"num_experts": 2, "num_experts_per_tok": 1, "mlp_only_layers": [1]}
        oracle.save(
            oracle.make(
                "qwen3_moe", vocab_size=2048, max_position_embeddings=256, **sizes, **experts
            ),
            moe,
        )
        shutil.copy(demo_model / "tokenizer.model", moe)
    arguments: list[str | Path] = {
        "convert": ["convert", demo_model, dst],
        "cast": ["convert", demo_model, dst, "--dtype", "fp32"],
        "shards": ["convert", demo_model, dst, "--to", "meta", "--mp", "2"],
        "rtn": ["quantize", demo_model, dst, "--scheme", "int4-g64", "--method", "rtn"],
        "gptq": ["quantize", demo_model, dst, "--scheme", "int4-g64", "--calibration", text, *GPTQ],
        "experts": [
            "quantize",
            moe,
            dst,
            "--scheme",
            "int4-g64",
            "--calibration",
            text,
            *GPTQ,
            "--samples",
            "24",
            "--no-source-check",
            "--accept-quality-loss",
        ],
    }[kind]
    forecast, peak = _measured(tmp_path, *arguments)
    assert forecast["memory_bytes"] == pytest.approx(peak, rel=0.2)
    assert forecast["disk_bytes"] == pytest.approx(
        sum(file.stat().st_size for file in dst.iterdir()), rel=0.2
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out", {"scheme": "int8"}),
        ("out.gguf", {"scheme": "q4_k_m"}),
        ("out", {"scheme": "fp8"}),
        ("out", {"dtype": "fp32"}),
        ("out", {"to": "meta", "mp": 2}),
    ],
    ids=str,
)
def test_the_memory_to_run_is_that_of_the_result(
    name: str, options: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    dst = tmp_path / name
    if "scheme" in options:
        arguments = {**options, "method": "rtn", "accept_quality_loss": True}
        forecast = quantkit.plan.quantize(demo_model, dst, **arguments)
        quantkit.quantize(demo_model, dst, **arguments)
    else:
        forecast = quantkit.plan.convert(demo_model, dst, **options)
        quantkit.convert(demo_model, dst, **options)
    inspected = quantkit.inspect(dst)
    stated = forecast.to_json()
    # Norms may be stored in a wider type than they run in.
    assert stated["run_bytes"] == pytest.approx(inspected.run_bytes, rel=0.005)
    assert stated["cache_bytes_per_token"] == inspected.cache_bytes_per_token
    assert any(size_text(forecast.to_run.weight_bytes) in line for line in forecast.lines())


def test_no_samples_are_drawn(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.txt"
    path.write_text(excerpt() * 20)
    calls: list[int] = []
    tokenized = data.tokenize_text

    def counted(text: str, tokenizer: Tokenizer, *, specials: bool) -> tuple[list[int], list[int]]:
        calls.append(len(text))
        return tokenized(text, tokenizer, specials=specials)

    monkeypatch.setattr(data, "tokenize_text", counted)
    found = quantkit.plan.quantize(
        demo_model,
        tmp_path / "out",
        "int8",
        method="gptq",
        calibration=path,
        samples=2000,
        length=64,
    )
    assert found.seconds > 0
    assert calls == [data.MAX_WHOLE_LENGTH]


def test_time_counts_what_does_not_shrink_with_the_model(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("logit", "rounding", "operation"):
        monkeypatch.setattr(
            f"quantkit.jobs.output.speed._seconds_of_{name}", lambda *_, **options: 0.0
        )
    dst = tmp_path / "out"
    seconds = [
        quantkit.plan.convert(demo_model, dst, source_check=False).seconds,
        quantkit.plan.convert(demo_model, dst).seconds,
        quantkit.plan.quantize(demo_model, dst, "int8").seconds,
        quantkit.plan.quantize(
            demo_model, dst, "int8", method="gptq", calibration=text, samples=8
        ).seconds,
        quantkit.plan.quantize(
            demo_model, dst, "int8", method="gptq", calibration=text, samples=99
        ).seconds,
    ]
    assert seconds == sorted(set(seconds))
    assert seconds[0] > 0.1


@pytest.mark.slow
def test_the_steps_are_the_phases_that_the_job_reports(
    demo_model: Path, text: Path, tmp_path: Path
) -> None:
    gptq = {"method": "gptq", "samples": 20, "length": 64}
    jobs: list[tuple[Any, dict[str, Any]]] = [
        (quantkit.convert, {}),
        (quantkit.quantize, {"scheme": "int4-g64", "method": "rtn"}),
        (quantkit.quantize, {"scheme": "int8", **gptq, "certify_positions": 64}),
        (quantkit.quantize, {"target_bits": 6, "calibration": text, "samples": 20, "length": 64}),
    ]
    for number, (job, options) in enumerate(jobs):
        phases: list[str] = []
        estimates: list[quantkit.Estimate] = []
        job(
            demo_model,
            tmp_path / str(number),
            **options,
            on_estimate=estimates.append,
            progress=lambda phase, done, total, unit, phases=phases: phases.append(phase),
        )
        (estimate,) = estimates
        reported = [phase for phase in dict.fromkeys(phases) if phase != "sha256 of the source"]
        assert list(estimate.steps) == reported
        assert estimate.seconds == pytest.approx(sum(estimate.steps.values()))
        assert min(estimate.steps.values()) > 0


@pytest.mark.slow
def test_refining_is_counted_with_the_phases_that_the_job_reports(
    demo_model: Path, text: Path, tmp_path: Path
) -> None:
    calibration: dict[str, Any] = {"calibration": text, "samples": 96, "length": 64}
    plain = quantkit.plan.quantize(demo_model, tmp_path / "out", "int4-g32", **calibration)
    options = {**calibration, "refine": True, "epochs": 2}
    planned = quantkit.plan.quantize(demo_model, tmp_path / "out", "int4-g32", **options)
    assert planned.steps[TRAINING] > 0
    assert planned.seconds == pytest.approx(sum(planned.steps.values()))
    assert set(plain.steps) < set(planned.steps)
    assert planned.disk_bytes > plain.disk_bytes

    phases: list[str] = []
    quantkit.quantize(
        demo_model,
        tmp_path / "out",
        "int4-g32",
        **options,
        accept_quality_loss=True,
        progress=lambda phase, done, total, unit: phases.append(phase),
    )
    reported = [phase for phase in dict.fromkeys(phases) if phase in planned.steps]
    assert list(planned.steps) == reported


def test_choosing_schemes_counts_the_head_and_the_search_of_scales(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choice_seconds() -> float:
        planned = quantkit.plan.quantize(demo_model, tmp_path / "out", target_bits=5)
        return planned.steps[CHOICE]

    for name in ("logit", "rounding", "operation", "head_gradient"):
        monkeypatch.setattr(
            f"quantkit.jobs.output.speed._seconds_of_{name}", lambda *_, **options: 0.0
        )
    without = choice_seconds()
    monkeypatch.setattr("quantkit.jobs.output.speed._seconds_of_head_gradient", lambda config: 1.0)
    assert (
        choice_seconds() > without + 8192
    )  # tokens, each with a row of the head for every token it may draw
    monkeypatch.setattr("quantkit.jobs.output.speed._seconds_of_head_gradient", lambda config: 0.0)
    monkeypatch.setattr(
        "quantkit.jobs.output.speed._seconds_of_rounding", lambda *_, **options: 1.0
    )
    assert choice_seconds() > without + 1000


@pytest.mark.slow
def test_a_probe_tells_early_that_a_scheme_will_hardly_pass(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"method": "gptq", "calibration": text, "samples": 128, "length": 128}
    events: list[str] = []

    def quantize(name: str, **more: Any) -> quantkit.QuantizeResult:
        events.clear()
        return quantkit.quantize(
            demo_model,
            tmp_path / name,
            "int4-g128",
            **{**options, **more},
            on_note=lambda note: events.append(f"note: {note}"),
            progress=lambda phase, done, total, unit: events.append(phase),
        )

    planned = quantkit.plan.quantize(demo_model, tmp_path / "sound", "int4-g128", **options)
    quantize("sound")
    assert PROBE in planned.steps
    assert PROBE in events
    assert not any(event.startswith("note: ") for event in events)

    monkeypatch.setattr("quantkit.jobs.quantize.rounding_probe.GPTQ_GAIN", 1e-6)
    result = quantize("warned")
    (note,) = [event for event in events if event.startswith("note: ")]
    assert events.index(note) < events.index("quantize")
    assert "int4-g32" in note
    assert str(tmp_path / "warned") in note
    assert result.quality.problem() is None  # it is a note: what passes is written

    quantize("short", samples=16, length=64)
    assert PROBE not in events
    assert not any(event.startswith("note: ") for event in events)


def test_the_time_of_each_effort_is_reported(demo_model: Path, tmp_path: Path) -> None:
    planned = quantkit.plan.quantize(demo_model, tmp_path / "out", "int4-g64", effort="quick")
    assert list(planned.efforts) == ["quick", "default", "thorough"]
    assert list(planned.efforts.values()) == sorted(planned.efforts.values())
    assert planned.efforts["quick"] == planned.seconds
    assert any(line.startswith("time by `effort`: quick ") for line in planned.lines())
    assert quantkit.plan.quantize(demo_model, tmp_path / "out", "int8").efforts == {}


def test_small_amounts_are_not_zero(demo_model: Path, tmp_path: Path) -> None:
    assert "disk: 2." in str(lines := quantkit.plan.convert(demo_model, tmp_path / "out").lines())
    assert "0.00" not in str(lines)


def test_activations_beyond_the_budget_are_on_disk(
    demo_model: Path, text: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"method": "gptq", "calibration": text, "samples": 60, "length": 256}
    inside = quantkit.plan.quantize(demo_model, tmp_path / "out", "int4-g64", **settings)
    beyond = quantkit.plan.quantize(
        demo_model, tmp_path / "out", "int4-g64", activation_memory=10**6, **settings
    )
    tokens = 60 * 256
    assert inside.scratch_bytes == 0
    # Half of the eight batches go through the float model too.
    activation_bytes = 4 * tokens * (1.5 * 128 + 384)
    assert beyond.scratch_bytes == pytest.approx(activation_bytes - 10**6, rel=0.01)
    assert beyond.disk_bytes == inside.disk_bytes
    assert "of activations" in "\n".join(beyond.lines())


def test_a_group_that_limits_memory_holds_fewer_activations_and_is_named(
    demo_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"method": "gptq", "calibration": text, "samples": 60, "length": 256}
    wide = quantkit.plan.quantize(demo_model, tmp_path / "out", "int4-g64", **settings)
    monkeypatch.setattr(memory, "memory_limits", lambda: [MemoryLimit(20_000_000, 18_000_000)])
    tight = quantkit.plan.quantize(demo_model, tmp_path / "out", "int4-g64", **settings)
    beyond = quantkit.plan.quantize(
        demo_model, tmp_path / "out", "int4-g64", activation_memory=10**6, **settings
    )
    assert tight.scratch_bytes == beyond.scratch_bytes > 0
    assert tight.available_bytes == 20_000_000 < wide.available_bytes
    reason = "only 20 MB of memory is available"
    assert reason in tight.lines()
    assert reason in tight.line()
    assert not any("is available" in line for line in wide.lines())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "embedding", "int8"),
    [
        ({}, 2 * ROWS * 128, ROWS * (128 + 2)),
        ({"embedding": "int8"}, ROWS * (128 + 2), None),
        ({"to": "mlx"}, 2 * ROWS * 128, ROWS * (128 + 4)),
        ({"to": "gptq"}, 2 * ROWS * 128, None),
        ({"to": "gguf"}, 2 * ROWS * 128, ROWS * 128 // 32 * 34),
    ],
)
def test_sizes_are_compared_and_what_would_help_is_named(
    options: dict[str, Any], embedding: int, int8: int | None, demo_model: Path, tmp_path: Path
) -> None:
    settings = {"method": "rtn", **options}
    planned = quantkit.plan.quantize(demo_model, tmp_path / "out", "int4-g64", **settings)
    made = quantkit.quantize(demo_model, tmp_path / "out", "int4-g64", **settings)
    weights = planned.weights
    assert weights is not None
    assert made.weights == weights
    assert weights.source_bytes == sum(file.stat().st_size for file in demo_model.glob("*.pth"))
    files = (
        file for file in (tmp_path / "out").iterdir() if file.suffix in (".safetensors", ".gguf")
    )
    assert weights.output_bytes == pytest.approx(
        sum(file.stat().st_size for file in files), rel=1e-3
    )
    assert (weights.embedding_bytes, weights.embedding_int8_bytes) == (embedding, int8)
    compared = (
        f"{size_text(weights.output_bytes)}, smaller than the source's"
        f" {size_text(weights.source_bytes)}"
    )
    assert f"disk {compared}" in planned.line()
    assert f"disk: {compared}" in planned.lines()
    assert f", {compared}, " in made.lines()[0]
    assert planned.to_json()["weights"] == made.to_json()["weights"] == vars(weights)


def test_a_small_embedding_is_named_only_if_the_output_is_not_smaller() -> None:
    for source, embedding, named in (
        (400, 76, True),
        (400, 75, False),
        (300, 74, True),
        (299, 74, True),
    ):
        hints = WeightSizes(source, 300, embedding, 38).hints()
        assert bool(hints) == named, (source, embedding)
    assert 'the embedding is 0.074 kB of that; `embedding="int8"` makes it 0.038 kB' in hints
    assert "not smaller than" in WeightSizes(300, 300, 0, None).text()
    assert WeightSizes(299, 300, 74, None).hints() == []


def test_layers_are_counted_by_what_becomes_of_them(demo_model: Path, tmp_path: Path) -> None:
    forecast = quantkit.plan.quantize(
        demo_model, tmp_path / "out", "int4-g64", method="rtn", keep=["*.layers.0.*"]
    )
    assert forecast.layers == {"int4-g64": 21, "float": 8}
    assert "21 x int4-g64" in forecast.lines()[0]
    alone = quantkit.plan.quantize(
        demo_model, tmp_path / "out", "int4-g64", method="rtn", keep="*.layers.0.*"
    )
    assert alone.layers == forecast.layers


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_it_takes_the_arguments_of_the_command(command: str) -> None:
    group: Any = root.commands["plan"]
    planned, real = group.commands[command], root.commands[command]
    assert planned.params == real.params


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["quantize", "{src}", "{tmp}/out", "--scheme", "int5"], 2),
        (["quantize", "{src}", "{tmp}/out", "--scheme", "int8", "--samples", "8"], 2),
        (["quantize", "{src}", "{tmp}/out", "--scheme", "int4-g64", "--keep", "nothing"], 2),
        (["quantize", "{odd}", "{tmp}/out", "--scheme", "int4-g64", "--strict"], 2),
        (["quantize", "{tmp}", "{tmp}/out", "--scheme", "int8"], 3),
        (["quantize", "{src}", "{tmp}/there", "--scheme", "int8"], 5),
        (["quantize", "{src}", "{tmp}/begun", "--scheme", "int8"], 6),
        (["convert", "{src}", "{tmp}/there"], 5),
        (["convert", "{src}", "{tmp}/out", "--to", "meta", "--mp", "3"], 2),
    ],
)
def test_what_would_fail_is_said(
    arguments: list[str], code: int, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "begun.partial").mkdir()
    odd = oracle.save(
        oracle.make("llama", intermediate_size=96), tmp_path / "odd"
    )  # which 64 does not divide
    named = {"src": demo_model, "tmp": tmp_path, "odd": odd}
    found, out, err = run(capfd, "plan", *(part.format(**named) for part in arguments))
    assert (found, out) == (code, "")
    assert err.startswith("quantkit: error: ")


def test_a_full_disk_is_said(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6)
    )  # type: ignore[attr-defined]
    code, _, err = run(capfd, "plan", "convert", demo_model, tmp_path / "out")
    assert code == 5
    assert "too little space" in err


def test_planning_leaves_nothing(demo_model: Path, tmp_path: Path) -> None:
    forecast = quantkit.plan.convert(demo_model, tmp_path / "deep" / "out")
    assert forecast.seconds > 0
    assert not list(tmp_path.iterdir())


def test_the_time_of_a_run_that_is_continued_is_an_upper_bound(
    demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.partial").mkdir()
    found = [
        quantkit.plan.quantize(demo_model, tmp_path / name, "int8", resume=True)
        for name in ("out", "new")
    ]
    assert [one.resumed for one in found] == [True, False]
    assert [", as an interrupted run is continued, disk " in one.line() for one in found] == [
        True,
        False,
    ]
