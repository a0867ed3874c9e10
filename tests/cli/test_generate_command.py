"""``quantkit generate`` with one prompt: its options, and what it says of its speed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from command import Capture, run, without_progress
from terminal import Terminal

import quantkit
from quantkit.base.memory import size_text
from quantkit.errors import RequestError

pytestmark = pytest.mark.processes


def test_a_stop_string_ends_a_text(demo_model: Path, capfd: Capture) -> None:
    whole = run(capfd, "generate", demo_model, "The people", "--max-new-tokens", "12")[1]
    word = whole.split()[4]
    cut = run(
        capfd,
        "generate",
        demo_model,
        "The people",
        "--max-new-tokens",
        "12",
        "--stop",
        word,
        "--stop",
        "\x00",
    )[1]
    assert cut == whole[: whole.index(word, len("The people"))] + "\n"
    both = ("--draft", demo_model, "--draft-tokens", "2")
    assert (
        run(
            capfd,
            "generate",
            demo_model,
            "The people",
            "--max-new-tokens",
            "12",
            "--stop",
            word,
            *both,
        )[1]
        == cut
    )


def test_several_samples_stand_one_below_the_other(demo_model: Path, capfd: Capture) -> None:
    requested = (
        "generate",
        demo_model,
        "The people",
        "--max-new-tokens",
        "4",
        "--temperature",
        "1",
    )
    code, out, _ = run(capfd, *requested, "--seed", "3", "-n", "3")
    assert code == 0
    alone = [run(capfd, *requested, "--seed", str(seed))[1] for seed in (3, 4, 5)]
    assert out == "".join(f"--- {number} of 3 ---\n{text}" for number, text in enumerate(alone, 1))


def test_all_sampling_options_of_one_prompt_are_the_librarys(
    demo_model: Path, capfd: Capture
) -> None:
    model, tokenizer = quantkit.load(demo_model, device="cpu")
    options: dict[str, Any] = {
        "temperature": 1.5,
        "seed": 3,
        "top_k": 30,
        "min_p": 0.01,
        "repetition_penalty": 1.4,
    }
    words = [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    (usual,) = quantkit.generate(model, tokenizer.encode("The people"), max_new_tokens=1, **options)
    pieces = quantkit.stream(
        model, tokenizer, "The people", max_new_tokens=8, logit_bias={usual: -100}, **options
    )
    expected = "".join(pieces)
    words += ["--max-new-tokens", "8", "--logit-bias", f"{usual}=-100"]
    _, out, _ = run(capfd, "generate", demo_model, "The people", *words)
    assert out == f"The people{expected}\n"


def test_too_long_a_prompt_is_cut_where_that_is_requested(demo_model: Path, capfd: Capture) -> None:
    prompt = "word " * 5000
    assert run(capfd, "generate", demo_model, prompt, "--max-new-tokens", "2")[0] == 2
    assert run(capfd, "generate", demo_model, prompt, "--max-new-tokens", "2", "--truncate")[0] == 0


def test_stats_report_times_and_the_share_of_bandwidth(
    demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.evals.timing.measure_bandwidth", lambda device: 1e12)
    code, _, err = run(
        capfd, "generate", demo_model, "The people", "--max-new-tokens", "4", "--stats"
    )
    assert code == 0
    stated, first, second, third = err.splitlines()
    assert size_text(quantkit.inspect(demo_model).run_bytes) in stated
    assert first.startswith("prompt: 3 tokens, ")
    assert first.endswith(" s")
    assert second.startswith("generated: 4 tokens, ")
    assert second.endswith(" tokens/s")
    assert third.startswith("weights: ")
    assert " 1000.0 GB/s" in third
    assert "%" in third


def test_what_exceeds_the_memory_is_refused_before_it_is_loaded(
    demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights with the cache of all tokens, of the slots that run together."""
    inspected = quantkit.inspect(demo_model)
    enough = inspected.run_bytes + 100 * inspected.cache_bytes_per_token
    monkeypatch.setattr("quantkit.jobs.inference.load.free_bytes", lambda device: enough)
    command = "generate", demo_model, "The people", "--max-new-tokens"
    assert run(capfd, *command, "97")[0] == 0
    monkeypatch.setattr("quantkit.jobs.inference.load.load_model", None)
    for further in (["98"], ["60", "--n", "2", "--temperature", "1"]):
        code, out, err = run(capfd, *command, *further)
        assert (code, out) == (RequestError.exit_code, "")
        assert str(demo_model) in err


def test_warm_up_says_how_many_steps_are_compiled(
    demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = ("generate", demo_model, "The people", "--max-new-tokens", "2", "--warmup")
    assert run(capfd, *requested)[2].startswith("quantkit: note: ")
    monkeypatch.setattr("quantkit.runtime.engine.Engine.warm_up", lambda self: 7)
    assert run(capfd, *requested)[2].startswith("quantkit: note: 7 ")


@pytest.mark.parametrize(
    "requested", ["The", "The -n 2", "--prompts IN --output -", "The --backend xla"]
)
def test_text_that_nobody_could_ever_read_is_not_generated(
    requested: str, demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text('{"prompt": "The"}\n')
    words = [str(tmp_path / "in") if word == "IN" else word for word in requested.split()]
    command = shlex.join(
        [sys.executable, "-m", "quantkit.cli", "generate", str(demo_model), *words]
    )
    done = subprocess.run(
        ["sh", "-c", f"{command} >&-"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 5
    assert done.stderr.startswith("quantkit: error: standard output ")
    assert done.stderr.count("\n") == 1


def test_a_file_is_made_though_stdout_is_closed(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt": "The", "max_new_tokens": 2}\n')
    command = shlex.join(
        forked.quantkit("generate", demo_model, "--prompts", "in", "--output", "out")
    )
    assert (
        subprocess.run(
            ["sh", "-c", f"{command} >&-"], cwd=tmp_path, timeout=600, check=False
        ).returncode
        == 0
    )
    assert (tmp_path / "out").read_text().count("\n") == 1


@pytest.mark.parametrize("requested", ["The", "--prompts IN --output -"])
def test_a_reader_that_has_seen_enough_is_no_error(
    requested: str, demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").write_text('{"prompt": "The"}\n')
    words = [str(tmp_path / "in") if word == "IN" else word for word in requested.split()]
    reading, writing = os.pipe()
    os.close(reading)
    command = forked.quantkit("generate", demo_model, *words)
    found = subprocess.run(
        command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=600, check=False
    )
    os.close(writing)
    assert (found.returncode, without_progress(found.stderr.decode())) == (0, "")


# A continuation that would set the terminal's title and color, clear it, and write over the line.
_DRIVES = """
import sys
from quantkit.runtime import generate

generate.text_pieces = lambda *given: iter(["a\\x1b]0;title\\x07\\x1b[31m", "\\x9b2J\\rb\\r\\n\\tc"])
from quantkit.cli.main import main
main(sys.argv[1:])
"""  # noqa: E501
_WRITTEN = "a\x1b]0;title\x07\x1b[31m\x9b2J\rb\r\n\tc"
_SPELLED = "a\\x1b]0;title\\x07\\x1b[31m\\x9b2J\\rb\n\tc"


def _drive(model: Path, folder: Path, *options: str) -> str:
    """Return what a terminal gets, with its own line breaks as newlines."""
    command = forked.command(
        "-c", _DRIVES, "generate", model, "One\x1b]0;", "--max-new-tokens", "1", *options
    )
    code, text = Terminal(*command, cwd=folder).end()
    assert code == 0, text
    return text.replace("\r\n", "\n")


@pytest.mark.slow
def test_a_continuation_does_not_drive_the_terminal(demo_model: Path, tmp_path: Path) -> None:
    shown = _drive(demo_model, tmp_path)
    assert f"One\\x1b]0;{_SPELLED}\n" in shown
    assert "\x1b]0;" not in shown
    assert "One\x1b]0;" + _WRITTEN in _drive(demo_model, tmp_path, "--raw")


def test_a_pipe_gets_every_byte_of_a_continuation(demo_model: Path, tmp_path: Path) -> None:
    command = forked.command("-c", _DRIVES, "generate", demo_model, "One", "--max-new-tokens", "1")
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.decode() == f"One{_WRITTEN}\n"


@pytest.mark.slow
def test_lines_of_json_do_not_drive_the_terminal(demo_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "One", "id": "\x9b2J\x7f\x1b"}) + "\n")
    requested = (
        "generate",
        demo_model,
        "--prompts",
        prompts,
        "--output",
        "-",
        "--max-new-tokens",
        "1",
    )
    found = {}
    for options in ((), ("--raw",)):
        code, text = Terminal(
            *forked.quantkit(*requested, *options), cwd=tmp_path, columns=1000
        ).end()
        assert code == 0, text
        line = re.search(r"\{.*\}", text)
        assert line is not None, text
        found[options] = line[0]
    assert "\x9b" not in found[()]
    assert "\x9b" in found["--raw",]
    assert json.loads(found[()]) == json.loads(found["--raw",])
