"""Models shared by processes: the same tokens as from one, each process with its part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
import tensor_parallel_worker as worker
import torch

import quantkit
from quantkit.data.files import excerpt
from quantkit.distributed.group import SINGLE
from quantkit.evals.evaluate import evaluate
from quantkit.model.cache import cache_bytes
from quantkit.model.decoder import Decoder

pytestmark = pytest.mark.processes

ODD: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "intermediate_size": 90,
    "vocab_size": 97,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
EVEN: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 128, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Case:
    """A model, in the dtype of its activations, and how many processes compile it with which
    backend.
    """

    dtype: str
    layers: int
    compiled: dict[int, str]


CASES = {
    "fp32": Case("float32", 4, {}),
    "int8": Case("float32", 4, {}),
    "int4-g128": Case("float32", 4, {}),
    "bf16": Case("bfloat16", 4, {}),
    "bf16-int8": Case("bfloat16", 4, {}),
    "odd": Case("float32", 3, {}),
    "small": Case("float32", 1, {2: "aot_eager", 4: "aot_eager"}),
    "small-int8": Case("float32", 1, {2: "aot_eager"}),
    "small-int4-g32-asym": Case("float32", 1, {4: "aot_eager"}),
}


DRAFTED = "int8"
AMONG_TWO = ("odd", "bf16-int8", "small-int8")
"""Models that four processes do not share: one has six heads, and of the others each trait is in
another model.
"""
ENGINE = ("small", 2)  # the model and processes for which code is generated


@pytest.fixture(scope="module")
def folders(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    quantkit.convert(demo_model, base / "fp32", dtype="fp32")
    quantkit.convert(demo_model, base / "bf16")
    for scheme in ("int8", "int4-g128"):
        quantkit.quantize(demo_model, base / scheme, scheme, method="rtn", accept_quality_loss=True)
    quantkit.quantize(demo_model, base / "bf16-int8", "int8", accept_quality_loss=True)
    oracle.save(oracle.make("llama", **ODD), base / "odd")
    oracle.save(oracle.make("llama", **EVEN), base / "small")
    for scheme in ("int8", "int4-g32-asym"):
        quantkit.quantize(
            base / "small", base / f"small-{scheme}", scheme, method="rtn", accept_quality_loss=True
        )
    return {name: base / name for name in CASES}


@dataclass(frozen=True)
class Findings:
    """What every process found out about every model, and the first one's logits."""

    processes: int
    each: list[dict[str, dict[str, Any]]]
    out: Path


@pytest.fixture(scope="module", params=[2, 4])
def shared(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Findings:
    out, count = tmp_path_factory.mktemp("findings"), request.param
    cases = [
        {
            "name": name,
            "folder": str(folders[name]),
            "dtype": case.dtype,
            "backend": case.compiled.get(count),
            "draft": str(folders["int4-g128"]) if name == DRAFTED else None,
            "engine": (name, count) == ENGINE,
        }
        for name, case in CASES.items()
        if not (count == 4 and name in AMONG_TWO)
    ]
    (out / "cases.json").write_text(json.dumps(cases))
    code = "import tensor_parallel_worker; tensor_parallel_worker.main()"
    for done in forked.group(count, code, out / "cases.json", out):
        assert done.returncode == 0, done.stderr
    return Findings(
        count, [json.loads((out / f"{rank}.json").read_text()) for rank in range(count)], out
    )


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, Decoder]:
    return {
        name: worker.opened(folder, getattr(torch, CASES[name].dtype), SINGLE)
        for name, folder in folders.items()
    }


@pytest.mark.slow
def test_the_tokens_are_those_of_one_process(shared: Findings, alone: dict[str, Decoder]) -> None:
    for name in shared.each[0]:
        if CASES[name].dtype == "bfloat16":
            continue  # sums of rounded parts: close, but a tie may fall the other way
        expected = worker.greedy(worker.Step(alone[name]))
        for process in shared.each:
            assert process[name]["steps"] == expected, name
            text = process[name]["tokens"]
            assert text == expected[: len(text)], name
            assert text


@pytest.mark.slow
def test_the_logits_of_a_batch_are_those_of_one_process(
    shared: Findings, alone: dict[str, Decoder]
) -> None:
    for name in shared.each[0]:
        found = torch.load(shared.out / f"{name}.pt")
        expected = worker.batch_logits(alone[name])
        assert found.shape == expected.shape
        close = 0.3 if CASES[name].dtype == "bfloat16" else 3e-3 if "int" in name else 1e-4
        assert (found - expected).abs().max() < close, name


def test_all_processes_see_the_same(shared: Findings) -> None:
    for name, first in shared.each[0].items():
        for process in shared.each[1:]:
            for fact in ("drawn", "logits", "kernels"):
                assert process[name][fact] == first[fact], (name, fact)


def test_a_draft_model_changes_nothing(shared: Findings) -> None:
    first = shared.each[0][DRAFTED]
    for process in shared.each:
        assert process[DRAFTED]["speculated"] == [first["tokens"], first["speculated"][1]]


def test_a_step_meets_twice_a_layer_and_at_both_ends(shared: Findings) -> None:
    for process in shared.each:
        for name, found in process.items():
            assert found["collectives"] == {
                "all_reduce": 2 * CASES[name].layers + 1,
                "all_gather_into_tensor": 1,
            }, name


def test_it_compiles_in_one_graph_to_the_same_tokens(shared: Findings) -> None:
    compiled = [name for name, case in CASES.items() if shared.processes in case.compiled]
    assert compiled
    for process in shared.each:
        for name in compiled:
            found = process[name]["compiled"]
            assert found["tokens"] == process[name]["steps"]
            assert len(found["graphs"]) == 2  # the prompt and a step
            assert found["graphs"] == [process[name]["collectives"]] * 2


def test_the_compiled_engine_gives_the_same_tokens(shared: Findings) -> None:
    name, count = ENGINE
    for process in shared.each:
        assert process[name]["engine"] == (
            process[name]["tokens"] if shared.processes == count else None
        )


@pytest.mark.parametrize("name", ["fp32", "int8", "bf16", "int4-g128"])
def test_each_process_has_its_part_in_memory(
    name: str, shared: Findings, alone: dict[str, Decoder]
) -> None:
    whole = sum(tensor.nbytes for tensor in (*alone[name].parameters(), *alone[name].buffers()))
    for process in shared.each:
        assert process[name]["bytes"] == pytest.approx(whole / shared.processes, rel=0.15)


def test_shared_models_keep_their_kernels_but_not_whole_blocks(
    shared: Findings, alone: dict[str, Decoder]
) -> None:
    for name in ("int8", "int4-g128"):
        assert alone[name].ops.blocks is not None
        for process in shared.each:
            assert process[name]["kernels"] == worker.backend_names(alone[name])
            assert not process[name]["fused"]


@pytest.mark.slow
def test_the_command_speaks_once(folders: dict[str, Path]) -> None:
    drawn = ["--temperature", "1", "--max-new-tokens", "12"]
    command = forked.launched(2, "generate", folders["int8"], "--prompt", "My fellow", *drawn)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("My fellow") == 1
    assert "quantkit" not in done.stderr


@pytest.mark.slow
def test_eval_measures_what_one_process_measures(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_text(excerpt()[:1500])
    options = [
        "--text",
        tmp_path / "text",
        "--against",
        folders["fp32"],
        "--window",
        "64",
        "--json",
        tmp_path / "json",
    ]
    done, _ = forked.group(2, forked.COMMAND, "eval", folders["int8"], *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("word ppl") == 1
    expected = evaluate(
        [folders["int8"]], texts=[tmp_path / "text"], against=folders["fp32"], window=64
    )
    found = json.loads((tmp_path / "json").read_text())
    for row, one in zip(found["rows"], expected.to_json()["rows"], strict=True):
        assert row["name"] == one["name"]
        theirs = one["texts"]["text"]
        assert row["texts"]["text"]["documents"] == pytest.approx(theirs["documents"], rel=1e-4)
        assert row["texts"]["text"]["token_perplexity"] == pytest.approx(
            theirs["token_perplexity"], rel=1e-4
        )


@pytest.mark.slow
def test_bench_measures_a_shared_model(folders: dict[str, Path], tmp_path: Path) -> None:
    few = [
        "--batch",
        "2",
        "--prompt-lengths",
        "8",
        "--contexts",
        "48",
        "--runs",
        "1",
        "--json",
        tmp_path / "json",
    ]
    done, _ = forked.group(2, forked.COMMAND, "bench", folders["fp32"], *few)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("threads") == 1
    (found,) = json.loads((tmp_path / "json").read_text())
    whole = worker.opened(folders["fp32"], None, SINGLE)
    embedding = whole.model.embed_tokens.weight.nbytes
    own = sum(tensor.nbytes for tensor in (*whole.parameters(), *whole.buffers())) - embedding
    assert found["weight_bytes"] == pytest.approx(own / 2, rel=0.05)
    (row,) = found["at_contexts"]
    assert row["cache_bytes"] < cache_bytes(
        whole.config, 2, 48, torch.float32
    )  # those of its own heads


def _reported(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("quantkit: ")]


DIFFERENT = """
import json, os, sys
from quantkit.cli.main import main
main(json.loads(sys.argv[1 + int(os.environ["RANK"])]))
"""


def _run_apart(*commands: list[str | Path]) -> str:
    """What processes that were given different commands say."""
    given = [json.dumps([str(part) for part in command]) for command in commands]
    all_ = forked.group(len(commands), DIFFERENT, *given)
    assert 0 not in [done.returncode for done in all_]
    (reported,) = _reported("".join(done.stderr for done in all_))
    return reported


def test_processes_with_different_files_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    other = oracle.copy(folders["fp32"], tmp_path / "other")
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00")
    (other / "quantkit.json").unlink()
    reported = _run_apart(*(["generate", m, "--prompt", "My"] for m in (folders["fp32"], other)))
    assert reported.startswith("quantkit: error: ")
    assert "model.safetensors" in reported


@pytest.mark.slow
def test_processes_with_different_seeds_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(excerpt())
    arguments = ["--scheme", "int8", "--method", "gptq", "--calibration", tmp_path / "text"]
    command = ["quantize", folders["fp32"], tmp_path / "out", *arguments]
    reported = _run_apart(*([*command, "--seed", seed] for seed in ("1", "2")))
    assert reported.startswith("quantkit: error: ")
    for name in ("seed", "found 2 in process 1", "expected 1 as in process 0"):
        assert name in reported
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_error_of_all_is_reported_once(folders: dict[str, Path]) -> None:
    all_ = forked.group(3, forked.COMMAND, "generate", folders["fp32"], "--prompt", "My")
    assert 0 not in [done.returncode for done in all_]
    (reported,) = _reported("".join(done.stderr for done in all_))
    assert "the attention heads cannot be divided among the processes" in reported
    assert "3 processes" in reported


@pytest.mark.slow
@pytest.mark.parametrize(("how", "count"), [(signal.SIGKILL, 4), (signal.SIGINT, 2)])
def test_a_lost_process_and_an_interruption_end_the_job(
    how: signal.Signals, count: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    """One of the processes is killed while they generate; or all are interrupted, as a terminal
    does.
    """
    out, err = tmp_path / "out", tmp_path / "err"
    drawn = ["--temperature", "1", "--seed", "3", "--max-new-tokens", "1000"]
    with out.open("w") as stdout, err.open("w") as stderr:
        job = subprocess.Popen(
            forked.launched(count, "generate", folders["fp32"], "--prompt", "My fellow", *drawn),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        while not out.stat().st_size and job.poll() is None:
            time.sleep(0.05)
        if how == signal.SIGKILL:
            os.kill(int(_children(job.pid)[-1]), how)
        else:
            os.killpg(job.pid, how)
        assert job.wait(timeout=120) != 0
        assert not _children(job.pid)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    reported = _reported(err.read_text())
    if how == signal.SIGINT:
        assert reported == ["quantkit: interrupted"]
    else:  # the launcher ends the others, before, while or after they find out
        assert len(reported) <= 1
        assert all(line.startswith("quantkit: ") for line in reported)
        assert err.read_text().count("Signal 9 (SIGKILL) received") == 1
    assert err.read_text().count("Traceback") == 1  # the launcher's own


def _children(pid: int) -> list[str]:
    return (
        Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if Path(f"/proc/{pid}").exists()
        else []
    )
