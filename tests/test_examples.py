"""The examples run, and do what they say."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import forked
import pytest
import torch
from paths import ROOT

import quantkit

EXAMPLES = ROOT / "examples"


def _run(name: str, *arguments: str | Path) -> str:
    """What an example prints."""
    done = forked.python((EXAMPLES / name).read_text(), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def int4(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "int4"
    quantkit.quantize(demo_model, folder, "int4-g64", method="rtn")
    return folder


@pytest.mark.slow
def test_a_file_of_prompts(int4: Path, tmp_path: Path) -> None:
    prompts = ["My fellow citizens", "Größe", "The people of the United States"]
    (tmp_path / "in").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    assert _run("batch_file.py", int4, tmp_path / "in", tmp_path / "out") == ""
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [one["prompt"] for one in found] == prompts
    model, tokenizer = quantkit.load(int4)
    for prompt, one in zip(prompts, found, strict=True):
        pieces = quantkit.stream(model, tokenizer, prompt, max_new_tokens=40, stop="\n\n")
        assert one["text"] == "".join(pieces)


@pytest.mark.slow
def test_a_conversation(int4: Path) -> None:
    command = forked.command("-c", (EXAMPLES / "chat.py").read_text(), int4, "llama2")
    done = subprocess.run(
        command, input="Who are you?\nAnd I?\n", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second, rest = re.split(r"(?:^|\n)> ", done.stdout)[1:]
    assert (bool(first), bool(second), rest) == (True, True, "")


def test_a_choice_by_log_probabilities(demo_model: Path) -> None:
    *lines, best = _run("multiple_choice.py", demo_model).splitlines()
    scores = {
        choice: float(score) for score, choice in (line.split(" nats a byte ") for line in lines)
    }
    model, tokenizer = quantkit.load(demo_model)
    start = len(tokenizer.encode("The capital of France is"))
    for choice, score in scores.items():
        ids = tokenizer.encode(f"The capital of France is{choice}")
        with torch.inference_mode():
            reported = model(torch.tensor([ids]), torch.arange(len(ids)))[0].float().log_softmax(-1)
        expected = sum(float(reported[at - 1, ids[at]]) for at in range(start, len(ids)))
        assert score == pytest.approx(expected / len(choice), abs=0.02)
    assert len(scores) == 3
    assert best == f"best: {max(scores, key=lambda one: scores[one]).strip()}"


@pytest.mark.slow
def test_transformers_says_what_quantkit_says(int4: Path) -> None:
    model, tokenizer = quantkit.load(int4, dtype="fp32", backend="reference")
    own = "".join(quantkit.stream(model, tokenizer, "My fellow citizens", max_new_tokens=30))
    found = _run("with_transformers.py", int4)
    assert found.startswith(f"My fellow citizens{own[:20]}")


@pytest.mark.parametrize("processes", [1, 2])
def test_metas_interface(processes: int, demo_model: Path) -> None:
    code = (EXAMPLES / "meta_interface.py").read_text()
    for rank, done in enumerate(
        forked.group(processes, code, demo_model, demo_model / "tokenizer.model")
    ):
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert bool(lines) == (rank == 0)
        if lines:
            assert lines[0].startswith("My fellow citizens ==> ")
            assert ast.literal_eval(lines[-1])["role"] == "assistant"


def test_every_example_is_listed() -> None:
    listed = re.findall(r"(\w+\.py) ", (EXAMPLES / "README.md").read_text())
    assert sorted(set(listed)) == sorted(path.name for path in EXAMPLES.glob("*.py"))
