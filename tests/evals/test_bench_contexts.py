"""`quantkit bench` with contexts and a price: what is decoded, what is left out.

No figure of speed is asserted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from command import Capture
from torch import Tensor

import quantkit
from quantkit.base.memory import peak_bytes, reset_peak
from quantkit.errors import RequestError
from quantkit.evals import bench_report, timing
from quantkit.evals.bench import _measure, bench
from quantkit.evals.bench_report import picture
from quantkit.evals.bench_result import Bench
from quantkit.evals.synthetic import synthetic
from quantkit.evals.table import render
from quantkit.evals.timing import CONTEXT_NEW, PROMPT, AtContext, Decoding, Rate
from quantkit.model.cache import KVCache, cache_bytes
from quantkit.model.load import load_model
from quantkit.runtime.engine import Engine

STEADY = Rate(20.0, 20.0, 20.0)
AT = AtContext(
    context=1024,
    batch=1,
    prompt_rate=100.0,
    together=STEADY,
    cache_bytes=24 * 10**6,
    peak_bytes=13 * 10**8,
)
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
    prefill={16: Rate(200.0, 190.0, 210.0)},
    decode={1: STEADY},
    one_thread=None,
    weight_bytes=10**9,
    bandwidth=2e10,
    peak_bytes=10**9,
    cache_dtype="bfloat16",
    loaded_bytes=11 * 10**8,
    run_bytes=11 * 10**8,
    cache_bytes_per_token=9216,
    at_contexts=[
        AT,
        replace(
            AT,
            batch=4,
            prompt_rate=126.0,
            together=Rate(60.0, 54.0, 61.0),
            cache_bytes=96 * 10**6,
            peak_bytes=None,
        ),
    ],
)
PRICED = replace(FOUND, price_per_hour=3.6)


def _bench(path: Path, **changes: Any) -> list[Bench]:
    options: dict[str, Any] = {
        "prompt_lengths": (),
        "batches": (1,),
        "threads": 1,
        "runs": 1,
        "device": "cpu",
    }
    return bench(path, **{**options, **changes})


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.evals.bench._measure_in_new_process", _measure)
    monkeypatch.setattr(timing, "measure_bandwidth", lambda _: 1e9)


# What is measured


@pytest.mark.slow
def test_each_context_is_measured_with_each_batch(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    quantkit.quantize(demo_model, tmp_path / "int8", "int8")
    code, out, errors = command.run(
        capfd,
        "bench",
        tmp_path / "int8",
        "--prompt-lengths",
        "8",
        "--batch",
        "1,3",
        "--contexts",
        "64,300,100000",
        "--runs",
        "2",
        "--threads",
        "1",
        "--price-per-hour",
        "7.2",
        "--json",
        tmp_path / "bench.json",
        "--plot",
        tmp_path / "bench.svg",
    )
    assert code == 0, errors
    assert "quantkit: note: int8 is not measured at context 100000: the model's is 4096" in errors
    (found,) = json.loads((tmp_path / "bench.json").read_text())
    rows = found["at_contexts"]
    assert [(row["context"], row["batch"]) for row in rows] == [
        (64, 1),
        (64, 3),
        (300, 1),
        (300, 3),
    ]
    config = load_model(tmp_path / "int8").config
    for row in rows:
        together = row["together"]
        assert 0 < together["least"] <= together["median"] <= together["most"]
        assert row["each"] == pytest.approx(together["median"] / row["batch"])
        assert row["cost_of_thousand_tokens"] == pytest.approx(2 / together["median"])
        assert row["cache_bytes"] == cache_bytes(
            config, row["batch"], row["context"], torch.bfloat16
        )
        assert found["loaded_bytes"] < row["peak_bytes"] <= found["peak_bytes"]
    assert set(found["prefill_at_contexts"]) == {"64", "300"}
    assert set(found["cost_of_thousand_tokens"]) == {"prefill", "decode", "prefill_at_contexts"}
    assert found["left_out"] == [
        {"context": 100000, "batch": None, "reason": "the model's is 4096"}
    ]
    lines = out.splitlines()
    (head,) = (line for line in lines if line.startswith("model  context  sequences"))
    assert "cost" in head
    first = (
        next(at for at in range(lines.index(head), len(lines)) if lines[at].startswith("---")) + 1
    )
    assert [line.split()[1:3] for line in lines[first : first + 4]] == [
        ["64", "1"],
        ["64", "3"],
        ["300", "1"],
        ["300", "3"],
    ]
    assert (tmp_path / "bench.svg").read_text().count("<!-- context -->") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_a_cache_in_8_bits_is_smaller(demo_model: Path) -> None:
    (found,) = _bench(demo_model, contexts=(64,), int8_cache=True)
    config = load_model(demo_model).config
    assert (found.dtype, found.cache_dtype) == ("bfloat16", "int8")
    assert [one.cache_bytes for one in found.at_contexts] == [
        cache_bytes(config, 1, 64, torch.int8)
    ]
    assert bench_report.build_tables([found])[2].rows[0][4] == "bfloat16, cache int8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_what_a_cache_takes_is_known_before(dtype: torch.dtype) -> None:
    config = synthetic("llama-160m", None).config
    cache = KVCache(config, 3, 5, dtype, "cpu")
    whole = sum(stored.nbytes for stored in cache.tensors())
    assert whole == cache_bytes(config, 3, 5, dtype)


def test_the_last_tokens_of_a_context_are_decoded_after_its_prompt(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(demo_model, dtype=torch.float32)
    decoding = Decoding(model, 3, CONTEXT_NEW, False, prompt=300 - CONTEXT_NEW)
    decoding.fill()
    prompts, steps = decoding._prompts, []
    assert torch.equal(prompts[0, :-PROMPT], prompts[2, :-PROMPT])
    assert not torch.equal(prompts[0], prompts[2])
    run = Engine.step

    def step(
        engine: Engine,
        tokens: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
    ) -> Tensor:
        steps.append(
            (
                tokens,
                list(slots),
                list(positions),
                list(wanted),
                run(engine, tokens, slots, positions, wanted),
            )
        )
        return steps[-1][-1]

    monkeypatch.setattr(Engine, "step", step)
    for _ in range(2):  # repeatedly, with the same tokens
        steps.clear()
        decoding.run()
        assert [one[1:4] for one in steps] == [
            ([0, 1, 2], [at] * 3, [0, 1, 2]) for at in range(300 - CONTEXT_NEW, 300)
        ]
        tokens = torch.cat([prompts, torch.stack([one[0] for one in steps], 1)], 1)
        logits = model(tokens, torch.arange(300))
        assert torch.equal(tokens[:, -CONTEXT_NEW:], logits[:, -CONTEXT_NEW - 1 : -1].argmax(-1))
        torch.testing.assert_close(steps[-1][-1], logits[:, -1], rtol=1e-3, atol=1e-3)


def test_the_peak_of_memory_begins_again() -> None:
    torch.ones(50_000_000)
    before = peak_bytes()
    assert reset_peak()
    assert peak_bytes() < before - 100_000_000
    torch.ones(50_000_000)
    assert peak_bytes() > before - 50_000_000


# What is left out


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_what_does_not_fit_in_memory_is_left_out(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = cache_bytes(load_model(demo_model).config, 2, 64, torch.bfloat16) + timing.SPARE_BYTES
    monkeypatch.setattr(timing, "free_bytes", lambda _: enough)
    (found,) = _bench(demo_model, contexts=(64, 128), batches=(1, 2))
    assert [(one.context, one.batch) for one in found.at_contexts] == [(64, 1), (64, 2), (128, 1)]
    (line,) = map(str, found.left_out)
    assert (
        line
        == "context 128 of 2 sequences: keys and values take 262 kB, and 256 MB of memory are free"
    )
    assert bench_report.list_notes([found])[-1] == f"mini-en is not measured at {line}"
    monkeypatch.setattr(timing, "free_bytes", lambda _: 0)
    with pytest.raises(
        RequestError,
        match="no context could be measured: context 64 of 1 sequence: keys and values",
    ):
        _bench(demo_model, contexts=(64,))


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_running_out_of_memory_leaves_out_the_row(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Decoding.fill

    def fails(decoding: Decoding) -> float:
        if decoding.engine.slots == 2 and decoding.engine.length == 96:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return fill(decoding)

    monkeypatch.setattr(Decoding, "fill", fails)
    (found,) = _bench(demo_model, contexts=(96, 128), batches=(2,))
    assert [one.context for one in found.at_contexts] == [128]
    assert found.left_out == [timing.LeftOut(96, 2, "does not fit in memory")]


def test_contexts_are_measured_of_a_model_that_has_them(demo_model: Path) -> None:
    with pytest.raises(
        RequestError, match=r"mini-en: the model's context is too short \(found 4096, .* 8192\)"
    ):
        _bench(demo_model, contexts=(9000, 8192))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--contexts", ""], "separated by commas"),
        (["--contexts", "1024,31"], "contexts must be at least 32"),
        (["--contexts", "-1"], "contexts must be at least 32"),
        (["--contexts", "100000"], "llama-160m: the model's context is too short"),
        (["--contexts", "9" * 80], "llama-160m: the model's context is too short"),
        (["--contexts", "4096", "--batch", "100000"], "does not fit in memory"),
        (["--price-per-hour", "0"], "invalid price (found 0.0, expected an amount above 0)"),
        (["--price-per-hour", "-1"], "invalid price"),
        (["--price-per-hour", "nan"], "invalid price"),
        (["--price-per-hour", "inf"], "invalid price"),
        (["--price-per-hour", "free"], "not a valid float"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_work(
    arguments: list[str], reason: str, capfd: Capture
) -> None:
    code, out, errors = command.run(capfd, "bench", "--synthetic", "llama-160m", *arguments)
    assert (code, out) == (2, "")
    assert reason in errors


# What is said


def test_a_thousand_tokens_cost_the_time_that_they_take() -> None:
    assert FOUND.cost(20.0) is None
    assert PRICED.cost(20.0) == pytest.approx(0.05)  # 50 s
    values = PRICED.to_json()
    assert values["cost_of_thousand_tokens"] == {
        "prefill": {16: pytest.approx(0.005)},
        "decode": {1: pytest.approx(0.05)},
        "prefill_at_contexts": {1024: pytest.approx(1 / 113)},
    }
    assert [row["cost_of_thousand_tokens"] for row in values["at_contexts"]] == pytest.approx(
        [0.05, 1 / 60]
    )
    assert not any("cost" in key for key in (*FOUND.to_json(), *FOUND.to_json()["at_contexts"][0]))


def test_tables_have_each_and_together_memory_and_cost() -> None:
    *_, decoding, prefill = bench_report.build_tables([FOUND])
    assert decoding.head == (
        "model",
        "context",
        "sequences",
        "each",
        "together",
        "weights MB",
        "cache MB",
        "peak MB",
    )
    assert decoding.rows == [
        ("a", "1024", "1", "20", "20", "1100", "24", "1300"),
        ("a", "1024", "4", "15", "60 ± 10%", "1100", "96", "-"),
    ]
    assert prefill.head == ("model", "context", "tokens a second", "seconds")
    assert prefill.rows == [("a", "1024", "113 ± 12%", "8.92")]
    *_, cost, decoding, prefill = bench_report.build_tables([PRICED])
    assert (cost.head, cost.rows) == (
        ("model", "prefill 16 cost", "decode 1 cost"),
        [("a", "0.00500", "0.0500")],
    )
    assert [row[-1] for row in decoding.rows] == ["0.0500", "0.0167"]
    assert [row[-1] for row in prefill.rows] == ["0.00885"]
    for table in (cost, decoding, prefill):
        assert "here an hour costs 3.6, of a thousand" in str(table.title)
    assert len(bench_report.build_tables([replace(FOUND, at_contexts=[])])) == 3


def test_tables_of_long_contexts_fit_a_terminal() -> None:
    rate = Rate(1234.5, 123.0, 1300.0)
    at = AtContext(
        context=4096,
        batch=16,
        prompt_rate=1234.5,
        together=rate,
        cache_bytes=1483 * 10**6,
        peak_bytes=12345 * 10**6,
    )
    one = replace(PRICED, name="tinyllama-1.1b-int4-g128", at_contexts=[at])
    for table in bench_report.build_tables([one])[-2:]:
        printed = render([table], "terminal")
        assert sum(line.startswith("model ") for line in printed) == 1
        assert max(map(len, printed)) <= 100


def test_costs_have_no_exponent() -> None:
    cheap = replace(PRICED, price_per_hour=0.0036, decode={1: Rate(9876.0, 9876.0, 9876.0)})
    assert bench_report.build_tables([cheap])[3].rows == [("a", "0.00000500", "0.000000101")]
    dear = replace(PRICED, price_per_hour=3.6e6)
    assert bench_report.build_tables([dear])[3].rows == [("a", "5000", "50000")]


@pytest.mark.parametrize("found", [FOUND, PRICED])
def test_one_sheet_has_a_row_for_each_context_and_batch(found: Bench) -> None:
    without = replace(found, name="b", at_contexts=[])
    head, *rows = csv.reader(render([bench_report.build_sheet([found, without])], "csv"))
    assert len(set(head)) == len(head)
    found_rows = [dict(zip(head, row, strict=True)) for row in rows]
    assert [
        (row["model"], row["context"], row["sequences"], row["together"]) for row in found_rows
    ] == [
        ("a", "1024", "1", "20"),
        ("a", "1024", "4", "60"),
        ("b", "", "", ""),
    ]
    assert [row["prefill_tokens_a_second"] for row in found_rows] == ["113", "113", ""]
    assert [row["decode_1"] for row in found_rows] == ["20"] * 3
    assert ("cost" in head) is ("decode_1_cost" in head) is (found is PRICED)


def test_runs_that_differ_widely_at_a_context_are_named() -> None:
    wide = replace(AT, together=Rate(20.0, 10.0, 21.0))
    (line,) = bench_report.list_warnings([replace(FOUND, at_contexts=[wide])])
    assert line.startswith("a figure spreads by 50% (context 1024, decode 1 of a): measure again")


def test_a_picture_has_a_panel_of_contexts_for_each_model() -> None:
    models = [replace(FOUND, name=f"model {number}") for number in range(4)]
    drawn = picture(models, "svg").decode()
    for number in range(4):
        assert f"<!-- decoding, model {number} -->" in drawn
    assert drawn.count("<!-- tokens a second, together -->") == 4
    assert "<!-- 1,024 -->" in drawn
