"""What commands do on a machine that has no kernels for a quantized model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import Capture, run

import quantkit

WARNING = "quantkit: warning: int8 runs without kernels"


@pytest.fixture(scope="module")
def int8(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "int8"
    quantkit.quantize(demo_model, folder, "int8")
    return folder


COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "INT8", "The", "--max-new-tokens", "2"),
    "draft": ("generate", "FLOATS", "The", "--max-new-tokens", "2", "--draft", "INT8"),
    "prompts": (
        "generate",
        "INT8",
        "--prompts",
        "prompts.jsonl",
        "--output",
        "out.jsonl",
        "--max-new-tokens",
        "2",
    ),
    "chat": ("chat", "INT8", "--template", "llama2", "--max-new-tokens", "2"),
    "bench": ("bench", "FLOATS", "INT8", "--prompt-lengths", "4", "--batch", "1", "--runs", "1"),
    "eval": ("eval", "INT8", "--speed", "--window", "16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_quantized_model_is_refused_unless_slowness_is_allowed(
    name: str,
    int8: Path,
    demo_model: Path,
    without_kernels: None,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The"}\n')
    folders = {"INT8": str(int8), "FLOATS": str(demo_model)}
    command = [folders.get(word, word) for word in COMMANDS[name]]
    for options, code in (((), 2), (("--allow-slow",), 0)):
        monkeypatch.setattr(
            sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"Who?\n"), isatty=lambda: False)
        )
        exit_code, out, err = run(capfd, *command, *options)
        assert exit_code == code, err
        if code:
            # A float model runs without kernels, with a warning.
            *notes, error = err.splitlines()
            assert out == ""
            assert all(
                line.startswith(("quantkit: warning: ", "quantkit: note: ")) for line in notes
            )
            assert error.startswith(f"quantkit: error: {int8}: ")
            for backend in ("cpu-exact", "cpu-fast", "triton"):
                assert backend in err
            assert "--allow-slow" in err
        else:
            assert err.count(WARNING) == 1
            assert err.count("install g++") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "bench"])
def test_the_reference_that_was_requested_needs_no_permission(
    name: str, int8: Path, demo_model: Path, without_kernels: None, capfd: Capture
) -> None:
    folders = {"INT8": str(int8), "FLOATS": str(demo_model)}
    code, _, err = run(
        capfd, *(folders.get(word, word) for word in COMMANDS[name]), "--backend", "reference"
    )
    assert (code, WARNING in err) == (0, False)


@pytest.mark.slow
def test_what_needs_no_kernels_works_without_a_word(
    int8: Path, without_kernels: None, tmp_path: Path, capfd: Capture
) -> None:
    for command in (
        ("inspect", int8),
        ("verify", int8),
        ("doctor", int8, "--deep"),
        ("eval", int8, "--window", "64"),
        ("convert", int8, tmp_path / "hf", "--to", "gguf"),
    ):
        code, _, err = run(capfd, *command)
        assert (code, "kernels" in err) == (0, False), err


@pytest.mark.slow
def test_rounding_to_int4_says_that_it_is_slower(
    demo_model: Path, without_kernels: None, tmp_path: Path, capfd: Capture
) -> None:
    code, _, err = run(
        capfd, "quantize", demo_model, tmp_path / "int4", "--scheme", "int4-g64", "--method", "rtn"
    )
    assert code == 0
    (warning,) = [line for line in err.splitlines() if line.startswith("quantkit: warning: ")]
    assert "int4" in warning
    assert "C++" in warning


@pytest.mark.slow
def test_the_demo_runs_and_names_the_remedy(
    without_kernels: None, tmp_path: Path, capfd: Capture
) -> None:
    code, _, err = run(capfd, "demo", "--quick", "--json", tmp_path / "found.json")
    assert code == 0
    assert json.loads((tmp_path / "found.json").read_text())["samples"]["int4-g64"]
    assert err.count("install g++") == 3  # rounding, float and quantized layers
