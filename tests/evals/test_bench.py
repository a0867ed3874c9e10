"""`quantkit bench`: what it measures, says and refuses. No figure of speed is asserted."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import oracle
import pytest
import torch
from command import Capture

import quantkit
from quantkit.architectures.topology import parameters
from quantkit.base.memory import enough_memory
from quantkit.distributed.group import ProcessGroup
from quantkit.errors import RequestError
from quantkit.evals import bench_report, timing
from quantkit.evals.bench import BenchArguments, BenchModel, _measure, bench, require_room
from quantkit.evals.bench_report import picture
from quantkit.evals.bench_result import Bench
from quantkit.evals.bench_results import BenchResult
from quantkit.evals.synthetic import synthetic
from quantkit.evals.table import render
from quantkit.evals.timing import OtherProcesses, Rate, measure_rate
from quantkit.formats.checkpoint import require_tensors
from quantkit.model.load import load_model
from quantkit.tensors.qtensor import QuantTensor

RATE = Rate(10.0, 9.0, 11.0)
FOUND = Bench(
    name="a",
    quantized=True,
    backends=["cpu-exact"],
    dtype="bfloat16",
    device="cpu",
    threads=2,
    cores=2,
    other_load=0.1,
    load_seconds=1.0,
    first_token_seconds=(0.2, 0.1),
    prefill={16: RATE},
    decode={1: RATE},
    one_thread=None,
    weight_bytes=10**9,
    bandwidth=2e10,
    peak_bytes=10**9,
    cache_dtype="bfloat16",
    loaded_bytes=11 * 10**8,
    run_bytes=11 * 10**8,
    cache_bytes_per_token=9216,
)


# What is measured


@pytest.mark.slow
def test_models_are_timed_side_by_side(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    quantkit.convert(demo_model, tmp_path / "float")
    quantkit.quantize(demo_model, tmp_path / "int8", "int8")
    code, out, errors = command.run(
        capfd,
        "bench",
        f"original={tmp_path / 'float'}",
        tmp_path / "int8",
        "--prompt-lengths",
        "8,16",
        "--batch",
        "1,2",
        "--runs",
        "2",
        "--threads",
        "1",
        "--json",
        tmp_path / "bench.json",
        "--plot",
        tmp_path / "bench.png",
    )
    assert code == 0, errors
    speed = out.split("\n\n")[0].splitlines()
    head = next(place for place, line in enumerate(speed) if line.startswith("model "))
    assert re.split("  +", speed[head]) == [
        "model",
        "prefill 8",
        "prefill 16",
        "decode 1",
        "decode 2",
    ]
    assert [line.split()[0] for line in speed[head + 2 :]] == ["original", "int8"]
    first, second = json.loads((tmp_path / "bench.json").read_text())
    assert (first["name"], first["quantized"], first["backends"]) == ("original", False, [])
    assert (second["name"], second["quantized"], second["backends"]) == (
        "int8",
        True,
        ["cpu-exact"],
    )
    assert set(second["prefill"]) == {"8", "16"}
    assert set(second["decode"]) == {"1", "2"}
    assert (second["device"], second["threads"]) == ("cpu", 1)
    for one in (first, second):
        for speed_of in (*one["prefill"].values(), *one["decode"].values()):
            assert 0 < speed_of["least"] <= speed_of["median"] <= speed_of["most"]
        assert one["load_seconds"] > 0
        assert one["other_load"] >= 0
        assert one["one_thread"] is None  # the threads are the requested ones
        assert one["bandwidth"] > 1e8
        assert one["peak_bytes"] > one["weight_bytes"] > 0
        assert one["run_bytes"] == pytest.approx(one["loaded_bytes"], rel=0.01)
        assert one["cache_bytes_per_token"] > 0
    assert second["weight_bytes"] < first["weight_bytes"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_model_whose_logits_are_not_finite_is_not_timed(tmp_path: Path, capfd: Capture) -> None:
    model = oracle.make("llama", max_position_embeddings=128)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    folder = oracle.save(model, tmp_path / "model")
    code, out, err = command.run(
        capfd, "bench", folder, "--prompt-lengths", "4", "--batch", "1", "--runs", "1"
    )
    assert (code, out) == (7, "")
    assert "logits are NaN or Inf" in err


def test_a_device_that_is_not_there_is_refused(demo_model: Path) -> None:
    with pytest.raises(RequestError, match="the device cannot be used"):
        bench(demo_model, prompt_lengths=(4,), batches=(), runs=1, device="no-such-device")


@pytest.mark.slow
def test_one_thread_is_tried_where_the_weights_are_few(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantkit.evals.bench.measure_rate", lambda *_: Rate(torch.get_num_threads(), 1, 2)
    )
    monkeypatch.setattr(timing, "measure_bandwidth", lambda _: 1e9)
    monkeypatch.setattr("quantkit.evals.bench._measure_in_new_process", _measure)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shape = BenchModel(shape="llama-160m", scheme="int8")
        for model, bytes_, expected in ((shape, 10**12, Rate(1, 1, 2)), (demo_model, 1, None)):
            monkeypatch.setattr("quantkit.evals.bench.SMALL_BYTES", bytes_)
            (found,) = bench(model, prompt_lengths=(), batches=(1,), runs=1)
            assert (found.one_thread, found.decode[1].median, torch.get_num_threads()) == (
                expected,
                2,
                2,
            )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_bench_reports_its_progress_to_a_script_without_a_main_guard(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = types.ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text("raise SystemExit('the script runs again')")
    monkeypatch.setitem(sys.modules, "__main__", script)
    reported: list[tuple[str, int, int, str]] = []
    options: dict[str, Any] = {"prompt_lengths": (4,), "batches": (1, 2), "threads": 1, "runs": 1}
    found = quantkit.bench([str(demo_model)], **options, progress=lambda *now: reported.append(now))
    assert reported == [("bench mini-en", done, 6, "measurements") for done in range(7)]
    assert found.to_json() == [found[0].to_json()]
    assert "decode 2" in "\n".join(found.lines())


def test_short_calls_are_repeated_until_a_run_is_long() -> None:
    calls = iter([9.0, *[0.03] * 4, 0.3, 0.05, 0.15])  # the first warms up
    found = measure_rate(6, lambda: next(calls), 3)
    assert (found.least, found.median, found.most) == pytest.approx((6 / 0.3, 12 / 0.2, 24 / 0.12))
    assert not list(calls)


def test_processes_that_share_a_model_make_as_many_calls_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, counts = ProcessGroup(), []
    for times in (
        [0.06] * 9,
        [0.02] * 9,
    ):  # of the first process, and of one whose clock runs slower
        first, calls = iter([0.06] * 9), iter(times)
        monkeypatch.setattr(
            ProcessGroup, "broadcast_from_rank0", lambda _, value, first=first: next(first)
        )
        assert measure_rate(12, lambda calls=calls: next(calls), 2, group).median == pytest.approx(
            200
        )
        counts.append(9 - len(list(calls)))
    assert counts == [5, 5]


def test_cores_that_others_use_are_all_that_are_used_but_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0, "own": 0.0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(timing.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(timing, "PROC_STAT", stat := tmp_path / "stat")
    ticks = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu  {5 * ticks} 0 0 {99 * ticks} {7 * ticks} 0 0 0 0 0\ncpu0 1 1\n")
    others = OtherProcesses()
    clock |= {"now": 10.0, "own": 12.0}
    stat.write_text(
        f"cpu  {18 * ticks} 0 {3 * ticks} {150 * ticks} {9 * ticks} 0 {ticks} {ticks} 0 0\ncpu0"
        " 1 1\n"
    )
    assert others.cores() == pytest.approx(
        0.6
    )  # 13 of users, 3 + 1 of the system, 1 stolen, less 12
    clock["own"] = 30.0
    assert others.cores() == 0
    stat.unlink()
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 1.0, 1.0))
    assert OtherProcesses().cores() == 3.5


# What is said


def test_tables_have_a_row_for_each_model_and_three_digits() -> None:
    fast = replace(
        FOUND,
        name="b",
        backends=[],
        decode={1: Rate(12345.6, 12000.0, 12888.0)},
        load_seconds=0.01234,
    )
    speed, start, memory = bench_report.build_tables([FOUND, fast])
    assert speed.head == ("model", "prefill 16", "decode 1")
    assert speed.rows == [("a", "10 ± 10%", "10 ± 10%"), ("b", "10 ± 10%", "12300 ± 4%")]
    assert [row[:4] for row in start.rows] == [
        ("a", "1", "200", "100"),
        ("b", "0.0123", "200", "100"),
    ]
    assert [(row[0], row[3], row[-1]) for row in memory.rows] == [
        ("a", "50%", "cpu-exact"),
        ("b", "61728%", "torch"),
    ]
    printed = render([speed, start, memory], "terminal")
    assert max(map(len, printed)) <= 100
    assert any("share of memory bandwidth" in line for line in printed)


def test_one_run_has_no_spread() -> None:
    speed, *_ = bench_report.build_tables([replace(FOUND, decode={1: Rate(12.0, 12.0, 12.0)})])
    assert speed.rows == [("a", "10 ± 10%", "12")]


def test_tables_of_default_lengths_fit_a_terminal() -> None:
    rates = {size: Rate(1234.5, 1200.0, 1300.0) for size in (1, 4, 8)}
    for name, width in (("Qwen2.5-0.5B-int4", 100), ("int4-g128", 80)):
        one = replace(FOUND, name=name, prefill={16: RATE, 128: RATE, 512: RATE}, decode=rates)
        for table in bench_report.build_tables([one]):
            printed = render([table], "terminal", width=width)
            assert sum(line.startswith("model ") for line in printed) == 1, table.head
            assert max(map(len, printed)) <= width
    rates = {size: Rate(12345.6, 1.0, 99999.0) for size in (1, 4, 8)}
    one = replace(
        FOUND, name="Qwen2.5-0.5B-int4", prefill={16: RATE, 128: RATE, 512: RATE}, decode=rates
    )
    for table in bench_report.build_tables([one]):
        assert sum(line.startswith("model ") for line in render([table], "terminal")) == 1, (
            table.head
        )


def test_the_share_of_bandwidth_is_that_of_the_weights_read() -> None:
    assert FOUND.share_of_bandwidth == pytest.approx(0.5)
    other = replace(FOUND, decode={4: RATE})
    assert other.share_of_bandwidth is None
    assert bench_report.build_tables([other])[2].rows[0][3] == "-"


def test_a_quantized_model_slower_than_its_floats_is_named() -> None:
    floats = replace(FOUND, name="b", quantized=False, decode={1: Rate(12.0, 11.0, 13.0)})
    assert bench_report.list_warnings([FOUND, floats]) == [
        "a decodes slower than b, which is not quantized"
    ]
    assert (
        bench_report.list_warnings([FOUND, replace(floats, decode={1: Rate(8.0, 7.0, 9.0)})]) == []
    )
    assert bench_report.list_warnings([floats]) == []


def test_runs_that_differ_widely_are_named() -> None:
    wide, steady = Rate(10.0, 8.0, 14.0), Rate(10.0, 8.0, 13.0)
    (line,) = bench_report.list_warnings([replace(FOUND, prefill={16: wide}, decode={1: steady})])
    assert line.startswith("a figure spreads by 40% (prefill 16 of a): measure again")
    wider = Rate(10.0, 8.0, 15.0)
    (line,) = bench_report.list_warnings(
        [replace(FOUND, prefill={1: wide, 2: wider, 3: wide}, decode={1: steady})]
    )
    assert line.startswith("3 figures spread by up to 50% (prefill 2 of a): measure again")


@pytest.mark.parametrize(
    ("device", "threads", "load", "busy"),
    [
        ("cpu", 2, 7.2, True),
        ("cpu", 2, 0.2, False),
        ("cpu", 2, None, False),
        ("cpu", 1, 0.9, False),
        ("cpu", 1, 1.4, True),
        ("NVIDIA H200", 2, 0.9, False),
    ],
)
def test_a_busy_machine_is_reported(
    device: str, threads: int, load: float | None, busy: bool
) -> None:
    one = replace(FOUND, device=device, threads=threads, other_load=load)
    assert one.busy is one.to_json()["busy"] is busy
    line = f"the machine is busy: other processes used {load} of its 2 cores; figures are low"
    assert bench_report.list_warnings([FOUND, one]) == [line] * busy


def test_threads_that_lose_are_reported() -> None:
    line = "one thread decodes a faster (812 tokens a second, not 340): try `threads=1`"
    one = replace(
        FOUND, decode={1: Rate(340.2, 330.0, 350.0)}, one_thread=Rate(812.3, 800.0, 820.0)
    )
    assert bench_report.list_notes([one, FOUND]) == [line]
    assert bench_report.list_notes([replace(one, one_thread=Rate(350.0, 340.0, 360.0))]) == []


def test_warnings_and_notes_are_on_stderr(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    lost = replace(FOUND, other_load=2.0, one_thread=Rate(20.0, 20.0, 20.0))
    monkeypatch.setattr("quantkit.evals.bench.bench", lambda *_, **__: BenchResult([lost]))
    code, out, err = command.run(capfd, "bench", demo_model, "--table", "csv")
    head, row = csv.reader(out.splitlines())  # one table
    assert code == 0
    assert (
        dict(zip(head, row, strict=True)).items()
        >= {
            "model": "a",
            "decode_1": "10",
            "decode_1_spread_percent": "10",
            "load_s": "1",
            "mb_a_token": "1000",
        }.items()
    )
    assert err.splitlines() == [
        (
            "quantkit: warning: the machine is busy: other processes used 2.0 of its 2 cores;"
            " figures are low"
        ),
        "quantkit: note: one thread decodes a faster (20 tokens a second, not 10): try --threads 1",
    ]


def test_folders_of_one_name_get_distinct_names(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    requested: list[BenchModel] = []
    for name in ("a", "b"):
        shutil.copytree(demo_model, tmp_path / name / "int4")
    monkeypatch.setattr(
        "quantkit.evals.bench._measure_in_new_process",
        lambda one, *_: requested.append(one) or FOUND,
    )
    assert (
        command.run(capfd, "bench", tmp_path / "a" / "int4", f"x={tmp_path / 'b' / 'int4'}")[0] == 0
    )
    assert [(model.name, model.path) for model in requested] == [
        ("a/int4", tmp_path / "a" / "int4"),
        ("x", tmp_path / "b" / "int4"),
    ]


@pytest.mark.parametrize("measured", [{}, {"decode": {}}, {"prefill": {}}])
def test_a_picture_has_a_panel_for_each_kind(measured: dict[str, Any]) -> None:
    drawn = picture([replace(FOUND, **measured), replace(FOUND, name="b" * 60, **measured)], "svg")
    assert drawn.startswith(b"<?xml")


# What is refused, and what goes wrong


@pytest.mark.parametrize(
    ("models", "options", "problem"),
    [
        ([], {}, "no model to measure"),
        (3, {}, "`models` is of the wrong type"),
        ("x", {"batches": "1,4"}, "`batches` is of"),
        ("x", {"batches": 4}, "expected integers in a list"),
        ("x", {"runs": "5"}, "`runs` is of the wrong type"),
        ("x", {"runs": 0}, "at least 1"),
        ("x", {"int8_cache": "no"}, "`int8_cache` is of the wrong type"),
    ],
)
def test_arguments_are_checked_before_a_model_is_opened(
    models: Any, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        quantkit.bench(models, **options)


@pytest.mark.parametrize(
    ("scheme", "head"),
    [(None, None), ("int8", None), ("int4-g32", "int4-g64"), ("int4-g128-asym", None)],
)
def test_random_weights_make_a_model_of_the_shape(scheme: str | None, head: str | None) -> None:
    made = synthetic("llama-160m", scheme, head)
    require_tensors(
        {name: made.info(name) for name in made.names()},
        {p.name: p.shape for p in parameters(made.config)},
        made.path,
    )
    first = made.load("model.layers.0.mlp.up_proj.weight")
    again = made.load("model.layers.0.mlp.up_proj.weight")
    if scheme is None:
        assert isinstance(first, torch.Tensor)
        assert isinstance(again, torch.Tensor)
        assert torch.equal(first, again)
    else:
        assert isinstance(first, QuantTensor)
        assert isinstance(again, QuantTensor)
        assert torch.equal(first.codes, again.codes)
        assert first.dequantize().std() == pytest.approx(0.023, rel=0.1)
        weight = made.load("lm_head.weight")
        assert isinstance(weight, QuantTensor)
        assert str(weight.scheme) == (head or "int8")
    small = replace(made.config, layers=made.config.layers[:1])
    model = load_model(replace(made, config=small))
    assert model(torch.tensor([[1, 2, 3]]), torch.arange(3)).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--synthetic SHAPE"),
        (["--synthetic", "llama-9t"], "unknown shape"),
        (["--synthetic", "llama-160m", "--scheme", "int5"], "unknown quantization scheme"),
        (["--synthetic", "llama-160m", "--head", "int8"], "--head requires --scheme"),
        (["--synthetic", "llama-160m", "--batch", "0"], "at least 1"),
        (["--synthetic", "llama-160m", "--batch", "one"], "separated by commas"),
        (["--synthetic", "llama-160m", "--batch", ""], "separated by commas"),
        (["--synthetic", "llama-160m", "--prompt-lengths", ""], "separated by commas"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "16,,8"], "separated by commas"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "9" * 5000], "separated by commas"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "-1"], "at least 1"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "9" * 80], "context is too short"),
        (["--synthetic", "llama-160m", "--batch", "9" * 80], "does not fit in memory"),
        (["--synthetic", "llama-160m", "--batch", "1000000000"], "does not fit in memory"),
        (["--synthetic", "llama-160m", "--runs", "0"], "at least 1"),
        (["--synthetic", "llama-160m", "--runs", "9" * 30], "runs are out of range"),
        (["--synthetic", "llama-160m", "--threads", "0"], "threads"),
        (["--synthetic", "llama-160m", "--threads", "-1"], "threads"),
        (["--synthetic", "llama-160m", "--threads", "9999999999"], "threads"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "100000"], "context is too short"),
        (
            ["--synthetic", "llama-160m", "--json", "/nowhere/at/all.json"],
            "cannot be written to this folder",
        ),
    ],
)
def test_requests_that_make_no_sense_end_before_the_work(
    arguments: list[str], reason: str, capfd: Capture
) -> None:
    code, _, errors = command.run(capfd, "bench", *arguments)
    assert code in (2, 5)
    assert reason in errors
    assert errors.count("\n") == 1


def test_errors_of_the_other_process_are_raised_here() -> None:
    with pytest.raises(RequestError, match="unknown backend"):
        bench(
            BenchModel(shape="llama-160m", scheme="int8"),
            prompt_lengths=(4,),
            batches=(),
            runs=1,
            backend="cuda-magic",
        )


def test_one_kind_of_measurement_is_enough() -> None:
    for prompts, batches in (((), (1,)), ((4,), ())):
        require_room(
            BenchModel(shape="llama-160m"),
            BenchArguments((), prompt_lengths=prompts, batches=batches, runs=1),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies", "reported"),
    [
        ("os._exit(3)", r"\(found exit code 3\)$"),
        ("os.kill(os.getpid(), 9)", r"\(found exit code -9\); it may have run out of memory"),
    ],
)
def test_a_process_that_dies_does_not_hang_the_command(
    dies: str, reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BenchModel, "__reduce__", lambda model: (exec, (f"import os; {dies}",)))
    with pytest.raises(RequestError, match=f"the measuring process was terminated {reported}"):
        bench(BenchModel(shape="llama-160m"), prompt_lengths=(4,), batches=(), runs=1)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4503599627370496 bytes."),
    ],
)
def test_running_out_of_memory_is_a_request_for_too_much(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not fit in memory"), enough_memory(tmp_path):
        raise error


def test_other_errors_are_not_taken_for_memory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"), enough_memory(tmp_path):
        raise RuntimeError("shape mismatch")
