"""Help pages and completion: what a user sees before anything is computed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from command import Capture, run

from quantkit.cli.main import quantkit
from quantkit.cli.options import EXIT_CODES, SHELLS
from quantkit.cli.signals import INTERRUPTED, TERMINATED
from quantkit.errors import QuantkitError
from quantkit.quality.verify import Verdict

COMMANDS = {
    (*path, name): command
    for path, group in (((), quantkit), (("plan",), quantkit.commands["plan"]))
    for name, command in group.commands.items()  # type: ignore[attr-defined]
}


def test_help_fits_a_terminal_and_begins_with_a_sentence(capfd: Capture) -> None:
    for path, command in COMMANDS.items():
        code, out, _ = run(capfd, *path, "--help")
        assert code == 0, path
        assert max(map(len, out.splitlines())) <= 100, path
        summary = command.get_short_help_str(70)
        assert not summary.endswith("..."), path


def test_the_list_of_commands_has_the_first_sentence_of_each(capfd: Capture) -> None:
    _, out, _ = run(capfd, "--help")
    listed = dict(
        re.findall(r"^  ([a-z-]+) {2,}(.+)$", out.partition("Commands:\n")[2], re.MULTILINE)
    )
    assert listed == {
        name: command.get_short_help_str(100) for name, command in quantkit.commands.items()
    }


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = """
import sys
from quantkit.cli.main import _ENTRIES, main
try:
    main(["--help"])
except SystemExit:
    pass
modules = {f"quantkit.cli.{entry.module}" for entry in _ENTRIES.values()}
print(sorted((modules - {"quantkit.cli.options"}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["convert", "quantize", "eval", "generate", "chat", "bench"])
def test_every_option_stands_in_one_section(name: str, capfd: Capture) -> None:
    command = quantkit.commands[name]
    _, out, _ = run(capfd, name, "--help")
    titles = re.findall(r"^([A-Z].*):$", out, re.MULTILINE)
    assert len(titles) == len(set(titles)) > 3
    assert titles[-1] == "Other options"
    listed = re.findall(
        r"^  (?:-\w, )?(--[\w-]+)", out.partition(f"{titles[0]}:\n")[2], re.MULTILINE
    )
    shown = [
        option.opts[-1]
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    assert sorted(listed) == sorted([*shown, "--help"])


def test_help_ends_with_every_exit_code(capfd: Capture) -> None:
    _, out, _ = run(capfd, "--help")
    listed = out[out.index("Exit codes:") :].splitlines()[1:]
    assert [int(line.split()[0]) for line in listed] == list(EXIT_CODES)
    kinds = {kind.exit_code for kind in QuantkitError.__subclasses__()} | {
        verdict.value for verdict in Verdict
    }
    assert {*kinds, INTERRUPTED, TERMINATED} <= set(EXIT_CODES)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_is_given_its_script(shell: str, capfd: Capture) -> None:
    code, out, _ = run(capfd, "completion", shell)
    assert code == 0
    assert "_QUANTKIT_COMPLETE=" in out


def _completions(*words: str) -> list[str]:
    environment = {
        **os.environ,
        "_QUANTKIT_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["quantkit", *words]),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-m", "quantkit.cli"]
    return subprocess.check_output(command, env=environment, text=True, cwd="/").splitlines()


@pytest.mark.slow
def test_commands_and_options_are_completed() -> None:
    assert _completions("qu") == ["plain,quantize"]
    assert "plain,--calibration" in _completions("quantize", "--cal")
    assert _completions("quantize", "--method", "g") == ["plain,gptq"]
    assert _completions("--version", "--verb") == ["plain,--verbose"]
    assert _completions("bench", "--threads", "0", "--pri") == ["plain,--price-per-hour"]
    assert [line.split(",")[0] for line in _completions("quantize", "x")] == ["file"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "--calibration", "x"),
        ("quantize", "--recipe", "x"),
        ("generate", "demo", "--prompt-file", "x"),
        ("eval", "--text", "x"),
        ("eval", "--json", "x"),
        ("eval", "--against", "x"),
        ("bench", "x"),
        ("eval", "a", "x"),
        ("plan", "generate", "x"),
    ],
)
def test_files_are_completed(words: tuple[str, ...]) -> None:
    assert _completions(*words) == ["file,x"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("quantize", "--scheme"), ("quantize", "--head"), ("bench", "--scheme")]
)
def test_schemes_are_completed(words: tuple[str, ...]) -> None:
    assert _completions(*words, "int4-g6") == ["plain,int4-g64", "plain,int4-g64-asym"]
    assert "plain,int8" in _completions(*words, "i")


@pytest.mark.slow
def test_a_path_after_a_name_is_completed(tmp_path: Path) -> None:
    """Also where the shell does not take the word apart."""
    for name in ("int4", "int8", "bf16"):
        (tmp_path / name).mkdir()
    assert _completions("bench", f"a={tmp_path}/int") == [
        f"plain,a={tmp_path}/{name}" for name in ("int4", "int8")
    ]
    assert _completions("eval", f"a={tmp_path}/none/x") == [""]
    assert _completions("eval", "a", "=", "x") == ["file,x"]


def test_the_backends_offered_are_those_there_are(capfd: Capture) -> None:
    from quantkit.kernels import BACKENDS, dispatch

    assert [backend.name for backend in dispatch.BACKENDS] == list(BACKENDS)
    code, _, err = run(capfd, "bench", "x", "--backend", "foo")
    assert code == 2
    assert all(repr(name) in err for name in BACKENDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "x"), "'generate'"),
        (("generate", "x", "-dash"), "--prompt=TEXT"),
    ],
)
def test_who_comes_from_elsewhere_is_reported_the_way(
    arguments: tuple[str, ...], words: str, capfd: Capture
) -> None:
    code, _, err = run(capfd, *arguments)
    assert code == 2
    assert words in err


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B"])
def test_a_name_on_a_hub_gets_a_hint(name: str, capfd: Capture) -> None:
    code, _, err = run(capfd, "inspect", name)
    assert code == 2
    assert f"hf:{name}\n" in err


@pytest.mark.parametrize("path", ["a/b/c", "/a/b", "../nowhere"])
def test_any_other_path_is_none_of_a_hub(path: str, capfd: Capture) -> None:
    code, _, err = run(capfd, "inspect", path)
    assert code == 2
    assert "hf:" not in err
