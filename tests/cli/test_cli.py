"""The command line: exit codes, one-line errors, what goes to which stream."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import forked
import oracle
import pytest
import torch
from command import PROGRESS, Capture, run, without_progress
from error_parts import raises
from paths import ROOT

import quantkit
from quantkit.base.messages import Message, Option
from quantkit.cli import entry
from quantkit.cli.main import main
from quantkit.errors import (
    CheckpointError,
    DestinationError,
    GroupError,
    NonFiniteError,
    QualityError,
    QuantkitError,
    RequestError,
    ResumeError,
    UnsupportedError,
)
from quantkit.formats.checkpoint import schemes
from quantkit.formats.detect import open_checkpoint
from quantkit.quality.verify import Verdict

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
    "bench",
)
WRONG_COMMAND_LINES = [
    ["--wrong"],
    ["wrong"],
    ["inspect"],
    ["inspect", "here", "--wrong"],
    ["inspect", "here", "there"],
    ["convert", "here", "there", "--to", "onnx"],
    ["convert", "here", "there", "--dtype", "fp8"],
    ["convert", "here", "there", "--mp", "two"],
    ["generate", "here", "--prompt", "x", "--temperature", "warm"],
]
CODES = {
    QuantkitError: 1,
    RequestError: 2,
    CheckpointError: 3,
    UnsupportedError: 4,
    DestinationError: 5,
    ResumeError: 6,
    NonFiniteError: 7,
    QualityError: 8,
    GroupError: 9,
}


def process(
    *arguments: str | Path, cwd: Path, module: bool = True
) -> subprocess.CompletedProcess[str]:
    """One command, or with `module` unset a Python program, as a process of its own."""
    command = [sys.executable, *(["-m", "quantkit.cli"] if module else []), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the job behind ``inspect`` raise."""

    def install(error: BaseException) -> None:
        def job(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr("quantkit.jobs.inspect.inspect", job)

    return install


# Help and version


def test_help_exits_0_and_goes_to_stdout(capfd: Capture) -> None:
    for command, flag in itertools.product((None, *COMMANDS), ("--help", "-h")):
        arguments = [flag] if command is None else [command, flag]
        code, out, err = run(capfd, *arguments)
        assert (code, err) == (0, ""), arguments
        assert out.startswith("Usage: "), arguments
        assert flag in out, arguments


def test_help_lists_every_command_and_every_exit_code(capfd: Capture) -> None:
    _, out, _ = run(capfd, "--help")
    assert all(f"\n  {command} " in out for command in COMMANDS)
    meanings = out.split("Exit codes:")[1]
    assert all(f" {code} " in meanings for code in (*range(8), 10, 11, 130))


@pytest.mark.parametrize("cwd", ["elsewhere", "root"])
def test_the_module_runs_from_any_folder(cwd: str, tmp_path: Path) -> None:
    found = process("--version", cwd=ROOT if cwd == "root" else tmp_path)
    assert found.returncode == 0, found.stderr
    assert quantkit.__version__ in found.stdout
    assert found.stderr == ""


@pytest.mark.parametrize(
    "program", ["import quantkit", "import quantkit.cli.main as m; m.main(['--help'])"]
)
def test_importing_and_help_import_neither_torch_nor_transformers(
    program: str, tmp_path: Path
) -> None:
    check = (
        "import sys, atexit; atexit.register(lambda: print('LOADED', {'torch', 'transformers'} &"
        " set(sys.modules)))"
    )
    found = process("-c", f"{check}; {program}", cwd=tmp_path, module=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "LOADED set()"


# Errors


def test_each_kind_of_error_is_one_line_with_its_exit_code(raising: Any, capfd: Capture) -> None:
    for kind, expected_code in CODES.items():
        raising(kind("is\nbroken", path="model.pth", found=1, expected=2, hint="mend it"))
        code, out, err = run(capfd, "inspect", "somewhere")
        assert (code, out) == (expected_code, ""), kind
        assert err == "quantkit: error: model.pth: is broken (found 1, expected 2); mend it\n"


def test_no_kind_of_error_is_without_a_test() -> None:
    assert set(CODES) == {QuantkitError, *QuantkitError.__subclasses__()}
    assert len(set(CODES.values())) == len(CODES)


@pytest.mark.parametrize(
    "error", [ValueError("a\nb"), AssertionError("a\nb"), RuntimeError("a\nb")]
)
def test_an_unexpected_exception_is_one_line_too(
    error: Exception, raising: Any, capfd: Capture
) -> None:
    raising(error)
    code, out, err = run(capfd, "inspect", "somewhere")
    assert (code, out) == (1, "")
    assert err == f"quantkit: internal error: {type(error).__name__}: a b; --debug shows more\n"


def test_only_what_quantkit_says_is_put_in_the_command_lines_spelling(
    raising: Any, capfd: Capture
) -> None:
    raising(RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"))
    assert "contains either `inf`, `nan` or element" in run(capfd, "inspect", "somewhere")[2]
    raising(QuantkitError("is there", hint=Message("give ", Option("weights", value="meta"))))
    assert run(capfd, "inspect", "somewhere")[2].endswith("give --weights meta\n")


@pytest.mark.parametrize(
    "error",
    [
        EOFError("short"),
        MemoryError(),
        RecursionError("deep"),
    ],
    ids=repr,
)
def test_an_unusual_exception_is_not_taken_for_an_interruption(
    error: Exception, raising: Any, capfd: Capture
) -> None:
    raising(error)
    code, _, err = run(capfd, "inspect", "somewhere")
    assert code == 1
    assert err.startswith(f"quantkit: internal error: {type(error).__name__}")


def test_a_command_line_that_cannot_be_parsed_exits_2(capfd: Capture) -> None:
    for arguments in WRONG_COMMAND_LINES:
        code, out, err = run(capfd, *arguments)
        assert (code, out) == (2, ""), arguments
        assert "Error: " in err, arguments
        assert "Traceback" not in err, arguments


@pytest.mark.slow
def test_the_head_is_quantized_where_requested(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    options = "--scheme", "int4-g32", "--method", "rtn", "--head", "int8", "--accept-quality-loss"
    assert run(capfd, "quantize", demo_model, tmp_path / "out", *options)[0] == 0
    found = schemes(open_checkpoint(tmp_path / "out"))
    assert str(found.pop("lm_head")) == "int8"
    assert {str(scheme) for scheme in found.values()} == {"int4-g32"}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--scheme", "int3-g128"], ("int3-g128", "int4-g128")),
        (["--scheme", "int4-g16"], ("int4-g16", "int4-g32", "int4-g64", "int4-g128")),
        (["--scheme", "int4"], ("int4-g128",)),
        ([], ("--scheme int8", "--target-bits", "--max-size", "--recipe FILE")),
        (["--method", "gptq"], ("--scheme int8",)),
        (["--scheme", "int8", "--calibration", "a.txt"], ("--calibration", "--method gptq")),
        (["--scheme", "int8", "--recipe", "recipe.json"], ("--scheme", "--recipe")),
        (["--recipe", "nowhere.json"], ("nowhere.json",)),
        (["--scheme", "int4-g32", "--head", "int2"], ("int2",)),
        (["--recipe", "recipe.json", "--head", "int8"], ("--head", "--recipe")),
        (["--scheme", "int8", "--keep", "*.nothing"], ("*.nothing",)),
        (["--scheme", "int8", "--keep", "*"], ()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_quantization_that_makes_no_sense_exits_2(
    arguments: list[str], names: tuple[str, ...], demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    code, _, err = run(capfd, "quantize", demo_model, tmp_path / "out", *arguments)
    assert code == 2
    assert err.startswith("quantkit: error: ")
    assert err.count("\n") == 1
    assert all(name in err for name in names)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_is_read(demo_model: Path, tmp_path: Path, capfd: Capture) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(
        '{"default": "int8", "overrides": [{"pattern": "*.down_proj", "scheme": "int4-g32"}]}'
    )
    code, _, err = run(
        capfd, "quantize", demo_model, tmp_path / "new", "--method", "rtn", "--recipe", recipe
    )
    assert (code, err) == (0, "")
    made = json.loads((tmp_path / "new" / "quantkit.json").read_text())
    assert made["format_version"] == 2
    assert made["recipe"] == json.loads(recipe.read_text())
    assert made["modules"]["model.layers.0.mlp.down_proj"]["scheme"] == "int4-g32"
    assert not {"plan", "tensors"} & set(made)


@pytest.mark.slow
def test_debug_shows_a_traceback_and_its_absence_one_line_with_the_same_exit_code(
    tmp_path: Path,
) -> None:
    plain = process("inspect", "nowhere", cwd=tmp_path)
    debug = process("--debug", "inspect", "nowhere", cwd=tmp_path)
    assert plain.returncode == 2
    assert plain.stderr.startswith("quantkit: error: nowhere: ")
    assert plain.stderr.count("\n") == 1
    assert "Traceback (most recent call last)" in debug.stderr
    assert "RequestError: nowhere: " in debug.stderr
    assert debug.returncode == 2


def test_a_reader_that_closes_the_pipe_is_no_error(demo_model: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "quantkit.cli", "inspect", str(demo_model)]
    found = subprocess.run(
        command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=600, check=False
    )
    os.close(writing)
    assert (found.returncode, found.stderr) == (0, b"")


@pytest.mark.slow
def test_a_verdict_is_reported_by_the_exit_code_whoever_reads(
    demo_model: Path, tmp_path: Path
) -> None:
    quantkit.convert(demo_model, tmp_path / "bf16")
    oracle.edit_json(tmp_path / "bf16" / "config.json", rms_norm_eps=1e-3)
    reading, writing = os.pipe()
    os.close(reading)
    command = forked.quantkit("verify", demo_model, tmp_path / "bf16")
    found = subprocess.run(
        command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=600, check=False
    )
    os.close(writing)
    assert (found.returncode, without_progress(found.stderr.decode())) == (11, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_an_output_that_cannot_be_written_is_an_error_of_one_line(
    demo_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "quantkit.cli", "inspect", str(demo_model)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, timeout=600, check=False
        )
    assert done.returncode == 5
    assert done.stderr.startswith(b"quantkit: error: ")
    assert done.stderr.endswith(b": No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_what_is_done_is_done_though_nobody_can_be_reported(
    demo_model: Path, tmp_path: Path
) -> None:
    command = forked.quantkit("convert", demo_model, tmp_path / "out")
    with open("/dev/full", "w") as full:
        assert (
            subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, timeout=600, check=False
            ).returncode
            == 0
        )
    assert (tmp_path / "out" / "quantkit.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_no_obstacle(closed: str, demo_model: Path, tmp_path: Path) -> None:
    convert = ["convert", str(demo_model), str(tmp_path / "out")]
    fresh = [sys.executable, "-m", "quantkit.cli", *convert]
    command = f"{shlex.join(fresh if ' ' in closed else forked.quantkit(*convert))} {closed}"
    assert subprocess.run(["sh", "-c", command], timeout=600, check=False).returncode == 0
    assert quantkit.verify(demo_model, tmp_path / "out").verdict is Verdict.SAME


# Streams


def test_inspect_prints_json_with_the_right_number_of_parameters(
    demo_model: Path, capfd: Capture
) -> None:
    shards = [
        torch.load(demo_model / f"consolidated.0{rank}.pth", weights_only=True) for rank in range(2)
    ]
    once = sum(t.numel() for name, t in shards[0].items() if "norm" in name)
    split = sum(
        t.numel()
        for shard in shards
        for name, t in shard.items()
        if not re.search("norm|freqs", name)
    )
    code, out, err = run(capfd, "inspect", demo_model, "--json", "-")
    found = json.loads(out)
    assert (code, err) == (0, run(capfd, "inspect", demo_model)[1])
    assert found["parameters"] == once + split
    assert (found["architecture"], found["layers"], found["heads"], found["kv_heads"]) == (
        "llama",
        4,
        4,
        2,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_inspect_counts_tied_parameters_once(tied: bool, tmp_path: Path, capfd: Capture) -> None:
    model = oracle.make("qwen2", tie_word_embeddings=tied)
    _, out, _ = run(capfd, "inspect", oracle.save(model, tmp_path / "model"), "--json", "-")
    assert json.loads(out)["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_inspect_counts_the_same_parameters_after_quantization(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    run(capfd, "quantize", demo_model, tmp_path / "int4", "--scheme", "int4-g32", "--method", "rtn")
    before, after = (
        json.loads(run(capfd, "inspect", p, "--json", "-")[1])
        for p in (demo_model, tmp_path / "int4")
    )
    assert after["parameters"] == before["parameters"]
    assert after["weight_bytes"] < before["weight_bytes"]
    assert after["tensors"]["int4-g32"] == 28


def test_the_result_goes_to_stdout_and_notes_to_stderr(tmp_path: Path, capfd: Capture) -> None:
    src, dst = oracle.save(oracle.make("llama"), tmp_path / "hf"), tmp_path / "out"
    code, out, err = run(capfd, "quantize", src, dst, "--scheme", "int4-g128", "--method", "rtn")
    assert code == 0
    assert out.startswith(f"wrote {dst}: int4-g64 ")
    assert out.count("\n") == 1
    lines = err.splitlines()
    assert all(line.startswith("quantkit: note: ") for line in lines)
    assert str(src) in lines[0]
    assert [("int4-g64" in line, "int4-g32" in line) for line in lines[1:]] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "SRC", "DST"],
        ["quantize", "SRC", "DST", "--scheme", "int8"],
        ["verify", "SRC", "SRC"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_progress_is_plain_lines_where_stderr_is_no_terminal(
    arguments: list[str], demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    places = {"SRC": str(demo_model), "DST": str(tmp_path / "out")}
    with pytest.raises(SystemExit) as stop:
        main([places.get(a, a) for a in arguments])
    out, err = capfd.readouterr()
    assert stop.value.code == 0
    assert out != ""
    assert without_progress(err) == ""
    phases = [found["phase"] for found in PROGRESS.finditer(err)]
    assert [phase for phase in phases if phase != "sha256 of the source"] == {
        "convert": ["check of the source", "convert", "exact"],
        "quantize": ["check of the source", "quantize", "gate"],
        "verify": ["tensors", "logits"],
    }[arguments[0]]


@pytest.mark.slow
def test_there_is_a_progress_bar_where_stderr_is_a_terminal(
    demo_model: Path, tmp_path: Path
) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [
        sys.executable,
        "-m",
        "quantkit.cli",
        "convert",
        str(demo_model),
        str(tmp_path / "out"),
    ]
    found = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, timeout=600, check=False
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert found.returncode == 0
    assert "convert:" in shown
    assert found.stdout.decode().startswith(f"wrote {tmp_path / 'out'}: ")


# Verify


@pytest.mark.slow
def test_verify_exits_0_or_11_and_with_strict_10(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    run(capfd, "convert", demo_model, tmp_path / "hf")
    run(capfd, "quantize", demo_model, tmp_path / "int8", "--scheme", "int8")
    broken = oracle.copy(demo_model, tmp_path / "broken")
    for path in sorted(broken.glob("*.pth")):
        shard = torch.load(path, weights_only=True)
        shard["layers.2.attention.wo.weight"].neg_()
        torch.save(shard, path)
    codes = [run(capfd, "verify", demo_model, tmp_path / name) for name in ("hf", "int8", "broken")]
    assert [code for code, _, _ in codes] == [0, 0, 11]
    strict = [
        run(capfd, "verify", "--strict", demo_model, tmp_path / name)[0]
        for name in ("hf", "int8", "broken")
    ]
    assert strict == [0, 10, 11]
    verdicts = [out.splitlines()[-1] for _, out, _ in codes]
    assert all(verdict.startswith("verdict: ") for verdict in verdicts)
    assert len(set(verdicts)) == 3


def test_verify_of_one_folder_holds_its_files_against_the_manifest(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    dst = tmp_path / "hf"
    run(capfd, "convert", demo_model, dst)
    code, out, _ = run(capfd, "verify", dst)
    assert code == 0
    assert str(dst) in out
    raw = bytearray((dst / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (dst / "model.safetensors").write_bytes(raw)
    code, out, err = run(capfd, "verify", dst)
    assert (code, out) == (3, "")
    assert str(dst / "model.safetensors") in err


# Generate


def generate(capfd: Capture, model: Path, *options: str) -> str:
    """The text that a prompt is continued to."""
    prompt = "It was a bright cold day"
    code, out, err = run(
        capfd, "generate", model, "--prompt", prompt, "--max-new-tokens", "24", *options
    )
    assert (code, err) == (0, "")
    assert out.startswith(prompt)
    assert len(out) > len(prompt) + 10
    return out


def test_generate_repeats_itself_with_a_seed_and_differs_with_another(
    demo_model: Path, capfd: Capture
) -> None:
    first, again, other = (
        generate(capfd, demo_model, "--temperature", "1.5", "--seed", s) for s in ("7", "7", "8")
    )
    assert first == again
    assert first != other


@pytest.mark.slow
def test_generate_is_greedy_by_default(demo_model: Path, capfd: Capture) -> None:
    assert generate(capfd, demo_model) == generate(capfd, demo_model, "--seed", "3")
    assert generate(capfd, demo_model) == generate(
        capfd, demo_model, "--temperature", "1.5", "--top-p", "1e-9"
    )


def test_generate_leaves_the_global_generator_alone(demo_model: Path, capfd: Capture) -> None:
    before = torch.get_rng_state()
    generate(capfd, demo_model, "--temperature", "1.5", "--seed", "7")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        pytest.param(["--prompt", ""], ("prompt",), id="empty"),
        pytest.param(["--prompt", "word " * 5000], ("expected at most 4096",), id="long"),
        pytest.param(
            ["--prompt", "a", "--max-new-tokens", "5000"], ("expected at most 4096",), id="many"
        ),
        pytest.param(
            ["--prompt", "a", "--max-new-tokens", "0"], ("found 0", "at least 1"), id="none"
        ),
        pytest.param(
            ["--prompt", "a", "--temperature", "-1"], ("temperature", "found -1"), id="temperature"
        ),
        pytest.param(
            ["--prompt", "a", "--temperature", "nan"], ("temperature", "found nan"), id="nan"
        ),
        pytest.param(["--prompt", "a", "--top-p", "0"], ("top_p", "found 0"), id="top-p"),
        pytest.param(["--prompt", "a", "--top-p", "1.5"], ("top_p", "found 1.5"), id="top-p-over"),
    ],
)
def test_generate_refuses_what_it_cannot_do(
    options: list[str], names: tuple[str, ...], demo_model: Path, capfd: Capture
) -> None:
    code, out, err = run(capfd, "generate", demo_model, *options)
    assert (code, out) == (2, "")
    assert err.startswith("quantkit: error: ")
    assert err.count("\n") == 1
    assert all(name in err for name in names)


def test_generate_refuses_a_prompt_without_tokens(demo_model: Path) -> None:
    model, _ = quantkit.load(demo_model)
    with raises(RequestError, "prompt"):
        quantkit.generate(model, [], max_new_tokens=1)


def test_generate_without_a_tokenizer_says_so(tmp_path: Path, capfd: Capture) -> None:
    src = oracle.save(oracle.make("llama"), tmp_path / "hf")
    code, out, err = run(capfd, "generate", src, "--prompt", "a")
    assert (code, out) == (3, "")
    assert err.startswith(f"quantkit: error: {src}: ")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_leave_the_processors_to_others(
    environment: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that it is as before at the end
    monkeypatch.delenv("GOMP_SPINCOUNT")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["quantkit", "--version"])
    with pytest.raises(SystemExit):
        entry.main()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
