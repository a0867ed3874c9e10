"""`--json`, `--report` and `--plot`: what is written, where, and what is refused before the
work.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import oracle
import pytest
from command import Capture, run
from error_parts import raises

from quantkit.cli.files import Outputs, replace
from quantkit.cli.main import quantkit
from quantkit.errors import DestinationError, RequestError
from quantkit.formats import manifest

LINES = {
    "convert": r"2\.62 MB, 16\.00 bits a weight, all 39 tensors equal bit for bit, [\d.]+ s\n",
    "quantize": (
        r"int4-g64-asym \(28 linears\) and int8 \(1 linear\), 1\.\d+ MB, smaller than the source's"
        r" 2\.65 MB,"
        r" \d\.\d\d bits a weight, KL 0\.\d+ ± 0\.\d+, perplexity [+-]\d\.\d % ± \d\.\d %,"
        r" [\d.]+ s\n"
        r"the embedding is 524 kB of that; --embedding int8 makes it 266 kB\n"
    ),
}
"""What the commands say of what they made of the demo's model, after its path."""


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    import quantkit

    folder = tmp_path_factory.mktemp("outputs") / "int8"
    quantkit.quantize(demo_model, folder, "int8")
    return folder


# What the commands write


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["inspect", "plan convert", "verify one", "verify two", "bench"]
)
def test_json_to_a_file_leaves_stdout_as_it_is_and_to_stdout_has_it_alone(
    command: str, int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(
        "quantkit.evals.bench_report.list_warnings", lambda found: []
    )  # what else runs decides on them
    arguments: list[str | Path] = {
        "inspect": ["inspect", int8],
        "plan convert": ["plan", "convert", int8, tmp_path / "out"],
        "verify one": ["verify", int8],
        "verify two": ["verify", int8, int8],
        "bench": [
            "bench",
            int8,
            "--batch",
            "1",
            "--prompt-lengths",
            "4",
            "--runs",
            "1",
            "--threads",
            "1",
        ],
    }[command]
    file = tmp_path / "found.json"
    code, out, err = run(capfd, *arguments, "--json", file)
    # Of what it takes to run, if it runs.
    notes = 1 if command == "bench" else 0
    assert (code, err.count("\n"), err.count("note: ")) == (0, notes, notes)
    lines = len(out.splitlines())
    assert lines > 0
    value = json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    code, out, err = run(capfd, *arguments, "--json", "-")
    assert (code, len(err.splitlines())) == (0, lines + notes)
    assert _shape(json.loads(out)) == _shape(value)


def _shape(value: Any) -> Any:
    """The keys; figures of speed and of time differ from run to run."""
    if isinstance(value, dict):
        return {key: _shape(entry) for key, entry in value.items()}
    return type(value)


def _writes_json(command: click.Command) -> bool:
    return "data" in {parameter.name for parameter in command.params}


def test_all_commands_that_find_something_out_write_json() -> None:
    writing = {name for name, command in quantkit.commands.items() if _writes_json(command)}
    plans = quantkit.commands["plan"]
    assert isinstance(plans, click.Group)
    assert writing == set(quantkit.commands) - {"chat", "completion", "generate", "plan", "serve"}
    assert all(_writes_json(command) for command in plans.commands.values())


@pytest.mark.slow
def test_convert_and_quantize_write_what_they_made(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    scheme = ["--scheme", "int4-g64-asym", "--head", "int8", "--method", "rtn"]
    for dst, *arguments in (["out", "convert"], ["int4", "quantize", *scheme]):
        file = tmp_path / "made.json"
        command, *options = arguments
        code, out, err = run(capfd, command, demo_model, tmp_path / dst, *options, "--json", file)
        assert code == 0
        assert re.fullmatch(re.escape(f"wrote {tmp_path / dst}: ") + LINES[command], out)
        value = json.loads(file.read_text())
        assert value["path"] == str(tmp_path / dst)
        assert [f"quantkit: note: {note}" for note in value["notes"]] == err.splitlines()
        assert value["manifest"] == json.loads((tmp_path / dst / "quantkit.json").read_text())
        assert (
            value["bits_per_weight"]
            == 8 * value["weight_bytes"] / value["manifest"]["model"]["parameters"]
        )
    assert value["manifest"]["quality"]["passed"] is True
    code, out, err = run(capfd, "convert", demo_model, tmp_path / "again", "--json", "-")
    assert code == 0
    assert re.fullmatch(re.escape(f"wrote {tmp_path / 'again'}: ") + LINES["convert"], err)
    assert json.loads(out)["manifest"]["job"] == "convert"


def test_verify_writes_its_report_whatever_the_verdict(
    int8: Path, demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    broken = oracle.copy(int8, tmp_path / "broken")
    oracle.edit_json(broken / "config.json", rms_norm_eps=1e-3)
    report_file = tmp_path / "report.json"
    assert run(capfd, "verify", demo_model, int8, "--json", report_file)[0] == 0
    report = json.loads(report_file.read_text())
    assert (report["verdict"], report["problems"]) == ("within_bound", [])
    assert len(report["differing"]) == 28
    for tensor in report["differing"]:
        assert tensor["within"], tensor
        assert tensor["relative_error"] <= tensor["bound"], tensor
    assert report["probes"]["speech"]["divergence"]["kl"] > 0
    assert run(capfd, "verify", demo_model, broken, "--json", report_file)[0] == 11
    report = json.loads(report_file.read_text())
    assert report["verdict"] == "different"
    assert "norm_eps" in report["problems"][0]


def test_verify_of_one_folder_writes_what_it_found(
    int8: Path, tmp_path: Path, capfd: Capture
) -> None:
    assert run(capfd, "verify", int8, "--json", tmp_path / "report.json")[0] == 0
    value = json.loads((tmp_path / "report.json").read_text())
    content = manifest.read(int8)
    perplexities = {
        text["text"]: pytest.approx(text["perplexity"], rel=1e-3)
        for text in content["quality"]["texts"]
    }
    assert value == {
        "path": str(int8),
        "same": True,
        "ok": True,
        "files": len(content["files"]),
        "edited": {},
        "perplexities": perplexities,
        "manifest": content,
        "run_by": None,
        "not_run": None,
    }


# What is refused


@pytest.mark.parametrize(
    "command", ["inspect", "plan convert", "convert", "quantize", "verify", "eval", "bench"]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_file_of_a_model_is_never_replaced_nor_added(
    command: str, name: str, int8: Path, tmp_path: Path, capfd: Capture
) -> None:
    model = oracle.copy(int8, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    makes = [tmp_path / "out"] if command.endswith(("convert", "quantize")) else []
    scheme = ["--scheme", "int8"] if command == "quantize" else []
    code, out, err = run(capfd, *command.split(), model, *makes, *scheme, "--json", model / name)
    assert (code, out) == (5, "")
    assert err.startswith(f"quantkit: error: {model / name}: ")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_new_file_that_a_model_would_read_is_not_added(demo_model: Path, tmp_path: Path) -> None:
    model = oracle.copy(demo_model, tmp_path / "model")
    with raises(DestinationError, path=model / "generation_config.json"):
        Outputs(str(model / "generation_config.json"))
    Outputs(str(model / "evaluation.json"))
    for name in (
        "model-00001-of-00002.safetensors",
        "consolidated.09.pth",
        "pytorch_model.bin.index.json",
    ):
        with raises(DestinationError, path=model / name):
            Outputs(str(model / name))


def test_the_destination_is_not_a_place_for_json(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    for name in ("out", "out.partial"):
        code, _, err = run(
            capfd, "convert", demo_model, tmp_path / "out", "--json", tmp_path / name
        )
        assert code == 5
        assert err.startswith(f"quantkit: error: {tmp_path / name}: ")
    code, _, err = run(
        capfd, "convert", demo_model, tmp_path / "out", "--json", tmp_path / "out" / "made.json"
    )
    assert code == 5
    assert err.startswith(f"quantkit: error: {tmp_path / 'out' / 'made.json'}: ")
    assert not list(tmp_path.iterdir())


def test_what_a_command_reads_is_not_overwritten(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"default": "int8"}')
    arguments = ["quantize", demo_model, tmp_path / "out", "--recipe", recipe, "--json", recipe]
    code, _, err = run(capfd, *arguments)
    assert code == 5
    assert err.startswith(f"quantkit: error: {recipe}: ")
    assert recipe.read_text() == '{"default": "int8"}'
    text = recipe.rename(tmp_path / "text.txt")
    with raises(DestinationError, path=text):
        Outputs(None, report=text, reads=[text])


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="this folder is Linux's")
def test_a_folder_that_takes_no_files_is_refused_before_the_work(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: True)  # as for root
    code, _, err = run(capfd, "convert", demo_model, tmp_path / "out", "--json", "/proc/made.json")
    assert code == 5
    assert err.startswith("quantkit: error: /proc/made.json: ")
    assert not list(tmp_path.iterdir())


def test_a_folder_and_one_file_twice_are_refused(tmp_path: Path) -> None:
    with raises(DestinationError, path=tmp_path):
        Outputs(str(tmp_path))
    with raises(RequestError, path=tmp_path / "out.md"):
        Outputs(str(tmp_path / "out.md"), report=tmp_path / "out.md")


@pytest.mark.parametrize(
    ("option", "name"), [("report", "out.tex"), ("report", "out.pdf"), ("plot", "out.jpg")]
)
def test_a_suffix_of_another_kind_of_file_is_refused(
    option: str, name: str, tmp_path: Path
) -> None:
    with raises(RequestError, found=Path(name).suffix):
        Outputs(None, **{option: tmp_path / name})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["out", "out.md", "out.MD", "out.markdown", "out.txt"])
def test_markdown_goes_by_several_suffixes(name: str, tmp_path: Path) -> None:
    Outputs(None, report=tmp_path / name).write({}, report=lambda: "# text\n")
    assert (tmp_path / name).read_text() == "# text\n"


# How files are written


def test_a_file_is_there_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    Outputs(str(file)).write({"a": 1})

    def refused(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refused)
    with raises(DestinationError, "No space left on device"):
        Outputs(str(file)).write({"a": 2})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_files_are_there_whatever_becomes_of_the_rest(tmp_path: Path) -> None:
    outputs = Outputs(
        str(tmp_path / "found.json"), report=tmp_path / "out.md", plot=tmp_path / "out.png"
    )
    shown = []

    def no_room() -> None:
        shown.append(sorted(path.name for path in tmp_path.iterdir()))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        outputs.write({}, report=lambda: "# text\n", picture=lambda kind: b"drawn", show=no_room)
    assert shown == [["found.json", "out.md", "out.png"]]

    def no_report() -> str:
        raise DestinationError("cannot be written")

    with pytest.raises(DestinationError):
        outputs.write({"again": 1}, report=no_report, show=lambda: shown.append([]))
    assert json.loads((tmp_path / "found.json").read_text()) == {"again": 1}
    assert len(shown) == 2


@pytest.mark.parametrize("option", ["report", "plot"])
def test_a_report_and_a_picture_are_files(option: str) -> None:
    with raises(RequestError, f"--{option}"):
        Outputs(None, **{option: Path("-")})  # type: ignore[arg-type]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    Outputs(str(tmp_path / "found.json")).write({"a": [float("nan"), (float("inf"), 1.5)]})
    assert json.loads((tmp_path / "found.json").read_text()) == {"a": [None, [None, 1.5]]}


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    replace(pipe, b"content")
    reader.join()
    assert read == [b"content"]
    assert pipe.is_fifo()


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    replace(tmp_path / "link", b"content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"content"


def test_a_link_into_a_models_folder_is_refused(demo_model: Path, tmp_path: Path) -> None:
    model = oracle.copy(demo_model, tmp_path / "model")
    (tmp_path / "link").symlink_to(next(model.glob("params.json")))
    with raises(DestinationError, path=tmp_path / "link"):
        Outputs(str(tmp_path / "link"))


def test_a_full_disk_under_json_says_nothing_of_resuming(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    code, _, err = run(capfd, "convert", demo_model, tmp_path / "out", "--json", "/dev/full")
    assert code == 5
    assert "No space left on device" in err
    assert "resume" not in err


@pytest.mark.parametrize("stderr", ["/dev/full", "closed pipe"])
def test_json_reaches_stdout_whatever_becomes_of_stderr(
    stderr: str, demo_model: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "quantkit.cli", "inspect", str(demo_model), "--json", "-"]
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=full if stderr == "/dev/full" else writer,
            cwd=tmp_path,
            check=False,
        )
    os.close(writer)
    assert done.returncode == 0
    assert json.loads(done.stdout)["format"]


def test_a_name_of_a_hyphen_is_a_file_where_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Outputs("./-").write([1])
    assert json.loads((tmp_path / "-").read_text()) == [1]
