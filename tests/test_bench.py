"""`quantkit bench`: what it measures, says and refuses. No figure of speed is asserted."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import command
import oracle
import pytest
import torch
from command import Capture

import quantkit
from quantkit.errors import RequestError
from quantkit.evals.bench import Bench, Job, Rate, bench, require_room, slower_than_floats
from quantkit.evals.bench_report import table
from quantkit.evals.synthetic import synthetic
from quantkit.formats.checkpoint import require_complete
from quantkit.memory import enough_memory
from quantkit.model.load import load_model
from quantkit.tensors.qtensor import QuantTensor

RATE = Rate(10.0, 9.0, 11.0)
FOUND = Bench(
    "a", True, ["cpu-exact"], "bfloat16", "cpu", 2, 1.0, (0.2, 0.1), {16: RATE}, {1: RATE}, 10**9, 2e10, 10**9
)


def test_models_are_timed_side_by_side(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    quantkit.convert(demo_model, tmp_path / "float")
    quantkit.quantize(demo_model, tmp_path / "int8", "int8")
    code, out, errors = command.run(
        capfd, "bench", tmp_path / "float", tmp_path / "int8", "--prompt-lengths", "8,16", "--batch", "1,2",
        "--runs", "2", "--threads", "1", "--json", tmp_path / "bench.json", "--plot", tmp_path / "bench.png",
    )  # fmt: skip
    assert code == 0, errors
    assert "decode, batch 2, tok/s" in out
    first, second = json.loads((tmp_path / "bench.json").read_text())
    assert (first["name"], first["quantized"], first["backends"]) == ("float", False, [])
    assert (second["name"], second["quantized"], second["backends"]) == ("int8", True, ["cpu-exact"])
    assert set(second["prefill"]) == {"8", "16"}
    assert set(second["decode"]) == {"1", "2"}
    assert (second["device"], second["threads"]) == ("cpu", 1)
    for one in (first, second):
        for rate in (*one["prefill"].values(), *one["decode"].values()):
            assert 0 < rate["least"] <= rate["median"] <= rate["most"]
        assert one["load_seconds"] > 0
        assert one["bandwidth"] > 1e8
        assert one["peak_bytes"] > one["weight_bytes"] > 0
    assert second["weight_bytes"] < first["weight_bytes"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_whose_logits_are_not_finite_is_not_timed(tmp_path: Path, capfd: Capture) -> None:
    model = oracle.make("llama", max_position_embeddings=128)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    folder = oracle.save(model, tmp_path / "model")
    code, out, err = command.run(capfd, "bench", folder, "--prompt-lengths", "4", "--batch", "1", "--runs", "1")
    assert (code, out) == (7, "")
    assert "logits are NaN or Inf" in err


def test_a_device_that_is_not_there_is_refused(demo_model: Path) -> None:
    job = Job(demo_model, None, None, None, (4,), (), None, 1, None, None, "no-such-device")
    with pytest.raises(RequestError, match="the device cannot be used"):
        bench([job])


def test_the_share_of_bandwidth_is_that_of_the_weights_read() -> None:
    assert FOUND.share_of_bandwidth == pytest.approx(0.5)
    assert "| of that in decoding | 50% |" in table([FOUND])
    assert replace(FOUND, decode={4: RATE}).share_of_bandwidth is None


def test_a_quantized_model_slower_than_its_floats_is_named() -> None:
    floats = replace(FOUND, name="b", quantized=False, decode={1: Rate(12.0, 11.0, 13.0)})
    assert slower_than_floats([FOUND, floats]) == ["a decodes slower than b, which is not quantized"]
    assert slower_than_floats([FOUND, replace(floats, decode={1: Rate(8.0, 7.0, 9.0)})]) == []
    assert slower_than_floats([floats]) == []


@pytest.mark.parametrize(
    ("scheme", "head"), [(None, None), ("int8", None), ("int4-g32", "int4-g64"), ("int4-g128-asym", None)]
)
def test_random_weights_make_a_model_of_the_shape(scheme: str | None, head: str | None) -> None:
    made = synthetic("llama-160m", scheme, head)
    require_complete({name: made.info(name) for name in made.names()}, made.config, made.path)
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
        ([], "give folders, or --synthetic"),
        (["--synthetic", "llama-9t"], "unknown shape"),
        (["--synthetic", "llama-160m", "--scheme", "int5"], "unknown quantization scheme"),
        (["--synthetic", "llama-160m", "--head", "int8"], "--head goes with --scheme"),
        (["--synthetic", "llama-160m", "--batch", "0"], "at least 1"),
        (["--synthetic", "llama-160m", "--batch", "one"], "separated by commas"),
        (["--synthetic", "llama-160m", "--batch", ""], "separated by commas"),
        (["--synthetic", "llama-160m", "--prompt-lengths", ""], "separated by commas"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "16,,8"], "separated by commas"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "9" * 5000], "separated by commas"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "-1"], "at least 1"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "9" * 80], "context is too short"),
        (["--synthetic", "llama-160m", "--batch", "9" * 80], "do not fit in memory"),
        (["--synthetic", "llama-160m", "--batch", "1000000000"], "do not fit in memory"),
        (["--synthetic", "llama-160m", "--runs", "0"], "at least 1"),
        (["--synthetic", "llama-160m", "--runs", "9" * 30], "runs are out of range"),
        (["--synthetic", "llama-160m", "--threads", "0"], "threads"),
        (["--synthetic", "llama-160m", "--threads", "-1"], "threads"),
        (["--synthetic", "llama-160m", "--threads", "9999999999"], "threads"),
        (["--synthetic", "llama-160m", "--prompt-lengths", "100000"], "context is too short"),
        (["--synthetic", "llama-160m", "--json", "/nowhere/at/all.json"], "cannot be written there"),
    ],
)
def test_requests_that_make_no_sense_end_before_the_work(arguments: list[str], reason: str, capfd: Capture) -> None:
    code, _, errors = command.run(capfd, "bench", *arguments)
    assert code in (2, 5)
    assert reason in errors
    assert errors.count("\n") == 1


def test_what_goes_wrong_in_the_other_process_is_told_as_usual() -> None:
    job = Job(None, "llama-160m", "int8", None, (4,), (), None, 1, "cuda-magic", None)
    with pytest.raises(RequestError, match="unknown backend"):
        bench([job])


def test_one_kind_of_measurement_is_enough() -> None:
    for prompts, batches in (((), (1,)), ((4,), ())):
        require_room(Job(None, "llama-160m", None, None, prompts, batches, None, 1, None, None))


def test_a_process_that_dies_does_not_hang_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.evals.bench._tell", os.kill)
    monkeypatch.setattr(Job, "checkpoint", lambda job: synthetic("llama-160m", None))
    pretended = Job(None, "llama-160m", None, None, (4,), (), None, 1, None, None)
    with pytest.raises(RequestError, match="the process that measures was ended"):
        bench([pretended])


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
)
def test_running_out_of_memory_is_a_request_for_too_much(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not fit in memory"), enough_memory(tmp_path):
        raise error


def test_other_errors_are_not_taken_for_memory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"), enough_memory(tmp_path):
        raise RuntimeError("shape mismatch")
