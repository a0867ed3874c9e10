"""Commands that need no tensor import neither torch nor what takes as long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from fake_api import fake_api, said

import quantkit
from quantkit.data.files import DEMO_MODEL

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "datasets",
    "pyarrow",
    "pandas",
    "huggingface_hub",
    "requests",
    "pydantic",
    "yaml",
    "lm_eval",
    "matplotlib",
)
COMMANDS = (
    "demo",
    "inspect",
    "doctor",
    "plan",
    "convert",
    "quantize",
    "verify",
    "push",
    "eval",
    "generate",
    "chat",
    "bench",
)
_RUN = """
import json, sys
from quantkit.cli.main import main
heavy, commands = json.loads(sys.argv[1])
for command in commands:
    try:
        main(command)
    except SystemExit as stop:
        imported = [name for name in heavy if name in sys.modules]
        print(json.dumps([stop.code, imported]), file=sys.stderr)
"""


def _run(*commands: tuple[str | Path, ...]) -> list[int]:
    """What commands exit with, one after the other in one process, which imports nothing heavy."""
    requested = json.dumps([HEAVY, [list(map(str, command)) for command in commands]])
    question = "A question?\n"  # for `chat`
    run = subprocess.run(
        [sys.executable, "-c", _RUN, requested],
        input=question,
        capture_output=True,
        text=True,
        cwd="/",
    )
    reported = [json.loads(line) for line in run.stderr.splitlines() if line.startswith("[")]
    assert len(reported) == len(commands), run.stderr
    for command, (_, imported) in zip(commands, reported, strict=True):
        assert imported == [], (command, run.stderr)
    return [code for code, _ in reported]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of every kind that is read, each in a folder."""
    made = tmp_path_factory.mktemp("folders")
    floats, tied = oracle.make("llama"), oracle.make("llama", tie_word_embeddings=True)
    source = oracle.save(floats, made / "source")
    quantkit.convert(DEMO_MODEL, made / "tokenizer", source_check=False)
    quantkit.convert(source, made / "shards", to="meta", mp=2)
    quantkit.quantize(
        source, made / "quantized", "int4-g32", method="rtn", accept_quality_loss=True
    )
    quantkit.quantize(
        source, made / "zeros", "int4-g32-asym", method="rtn", accept_quality_loss=True
    )
    for name, model, zipped in (
        ("bin", floats, True),
        ("legacy", floats, False),
        ("tied", tied, True),
    ):
        (made / name).mkdir()
        model.config.save_pretrained(made / name)
        torch.save(
            model.state_dict(),
            made / name / "pytorch_model.bin",
            _use_new_zipfile_serialization=zipped,
        )
    return made


@pytest.mark.slow
def test_inspect_reads_headers_without_torch(folders: Path) -> None:
    """Tied heads that are stored once more, and heads that may be tied ones, are compared with
    the embedding.
    """
    models = [DEMO_MODEL, *sorted(folders.iterdir())]
    assert len(models) == 9
    assert _run(*(("inspect", model) for model in models)) == [0] * 9


@pytest.mark.slow
def test_inspect_reports_what_is_wrong_without_torch(folders: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in (folders / "source").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes()[:1000])
    wrong = (folders / "source" / "config.json", tmp_path, damaged)
    assert _run(("inspect", tmp_path / "none"), *(("inspect", path) for path in wrong)) == [
        2,
        3,
        3,
        3,
    ]
    assert _run(("inspect", folders / "source", "--weights", "meta")) == [3]


@pytest.mark.slow
def test_the_doctor_reads_headers_without_torch(folders: Path) -> None:
    assert _run(*(("doctor", model) for model in sorted(folders.iterdir()))) == [0] * 8


@pytest.mark.slow
def test_help_needs_no_torch() -> None:
    requested = [(name, "--help") for name in COMMANDS]
    assert set(_run(("--help",), ("--version",), *requested, ("plan", "convert", "-h"))) == {0}


@pytest.mark.slow
def test_a_request_that_makes_no_sense_is_reported_without_torch() -> None:
    wrong = (
        "nonsense",
        "inspect",
        "convert SRC",
        "convert SRC DST --nonsense",
        "quantize SRC DST --method nonsense",
        "quantize SRC DST",
        "plan quantize SRC DST",
        "plan DIR",
        "verify",
        "eval",
        "bench --nonsense",
        "generate DIR",
        "generate DIR --max-new-tokens many",
    )
    assert set(_run(*(tuple(command.split()) for command in wrong))) == {2}


@pytest.mark.slow
def test_a_server_is_talked_to_without_torch() -> None:
    """Also where it answers, or the address is wrong."""
    with fake_api(lambda body: said("x")) as api:
        assert _run(("chat", "--url", api.url)) == [0]
    assert [path for path, _, _ in api.requests] == ["/v1/models", "/v1/chat/completions"]
    assert (
        _run(("chat", "--url", "nowhere"), ("chat", "--url", "http://127.0.0.1:1"), ("chat",))
        == [2] * 3
    )


@pytest.mark.slow
def test_a_plain_mistake_is_reported_without_torch(folders: Path) -> None:
    source, out = str(folders / "source"), "/tmp/out"
    wrong = (
        ("quantize", source, out, "--scheme", "q4_9"),
        ("quantize", source, out, "--scheme", "int8", "--head", "q8"),
        ("plan", "quantize", source, out, "--scheme", "q4_9"),
        ("bench", "--synthetic", "llama-160m", "--scheme", "q4"),
        ("generate", source, "hi", "--temperature", "-1"),
        ("generate", source, "hi", "--top-p", "2"),
        ("generate", source, "hi", "--max-new-tokens", "0"),
        ("generate", source, "hi", "--backend", "foo"),
        ("bench", source, "--backend", "foo"),
        ("generate", "A prompt", source),
        ("generate", source, "-dash"),
        ("convert", source, out, "--to", "onnx"),
        ("convert", "nothere", ""),
        ("run", source),
        ("generate", source, "hi", "--top-k", "-2"),
        ("generate", source, "hi", "--min-p", "2"),
        ("generate", source, "hi", "--stop", ""),
        ("generate", source, "hi", "--n", "0"),
        ("generate", source, "hi", "--repetition-penalty", "0"),
        ("generate", source, "hi", "--logit-bias", "x"),
        ("generate", source, "hi", "--beam-size", "2"),
        ("generate", source, "hi", "--echo"),
        ("generate", source, "--prompts", out),
        ("generate", source, "--prompts", out, "--output", "-", "--batch", "0"),
    )
    assert set(_run(*wrong)) == {2}
    missing = (
        ("convert", "nothere", out),
        ("plan", "convert", "nothere", out),
        ("verify", source, "nothere"),
        ("quantize", "Qwen/Qwen2.5-0.5B", out, "--scheme", "int8"),
        ("bench", source, "nothere"),
        ("plan", "quantize", "nothere", out, "--scheme", "int8"),
        ("eval", "name=nothere"),
        ("eval", source, "--against", "nothere"),
        ("generate", "nothere", "hi"),
        ("generate", source, "hi", "--draft", "nothere"),
    )
    assert set(_run(*missing)) == {2}


@pytest.mark.slow
def test_what_is_wrong_in_a_file_of_prompts_is_reported_without_torch(
    folders: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text('{"prompt": "The people"}\n{"prompt": "The", "top_p": 0}\n')
    (tmp_path / "long").write_text('{"token_ids": [1], "max_new_tokens": 1000000}\n')
    requested = ("generate", folders / "tokenizer", "--output", tmp_path / "out", "--prompts")
    assert (
        _run(
            (*requested, tmp_path / "in"),
            (*requested, tmp_path / "long"),
            (*requested, tmp_path / "none"),
        )
        == [2] * 3
    )
