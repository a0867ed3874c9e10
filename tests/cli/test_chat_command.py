"""``quantkit chat``: on a terminal that somebody types on, and between pipes."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import oracle
import pytest
from command import Capture, run
from partial import no_hang
from terminal import READY, Terminal

import quantkit

pytestmark = pytest.mark.processes

# Tells the terminal, and waits for a signal: through a pipe, since it may come before the wait, and
# to any thread.
_WAIT = """
import os, signal, sys

def wait_for_signal():
    told, tells = os.pipe()
    os.set_blocking(tells, False)
    before = signal.set_wakeup_fd(tells)
    os.write(2, b"<waits>")
    try:
        os.read(told, 1)
    finally:
        signal.set_wakeup_fd(before)

"""

# An answer is not ended before Ctrl-C: it waits for it at its fourth step.
_ENDLESS = f"""{_WAIT}
from quantkit.runtime.engine import Engine
step, count = Engine.step, 0

def held(self, *arguments):
    global count
    count += 1
    if count == 4:
        wait_for_signal()
    return step(self, *arguments)

Engine.step = held
from quantkit.cli.main import main
main(sys.argv[1:])
"""


# The first question is never ready, until Ctrl-C.
_NEVER_READY = f"""{_WAIT}
from quantkit.runtime.chat_session import ChatSession
fitted = ChatSession._fit_conversation

def held(self, *arguments):
    ChatSession._fit_conversation = fitted
    wait_for_signal()

ChatSession._fit_conversation = held
from quantkit.cli.main import main
main(sys.argv[1:])
"""


# SIGTERM comes while the prompt starts its tasks.
_TERMINATED = """
import os, signal
from prompt_toolkit.application import Application

def begun(self, coroutine):
    os.kill(os.getpid(), signal.SIGTERM)

Application.create_background_task = begun
from quantkit.cli.entry import main
main()
"""


# An answer that would set the terminal's title, clear it, and write over the line.
_DRIVES = """
import sys
from quantkit.runtime.chat_session import ChatSession

ChatSession.ask = lambda self, text, interrupted=None: iter(["a\\x1b]0;title\\x07", "\\x9b2J\\rb\\r\\n\\tc\\ud800"])
from quantkit.cli.main import main
main(sys.argv[1:])
"""  # noqa: E501


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    with no_hang():
        yield


def _answer(model: Path, *questions: str, count: int = 6, system: str | None = None) -> str:
    """The last answer of a conversation."""
    loaded, tokenizer = quantkit.load(model)
    chat = quantkit.chat_format(model, tokenizer, "llama2")
    session = quantkit.ChatSession(loaded, tokenizer, chat, max_new_tokens=count, system=system)
    return ["".join(session.ask(question)) for question in questions][-1]


def _shown(text: str) -> str:
    """As a terminal shows it, new lines aside."""
    return " ".join(text.split())


def test_lines_of_a_pipe_are_answered_and_nothing_else_is_printed(
    demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "The people?\n\n  And the Congress?  \n/reset\nGröße 日本語\n/system Be brief.\nThe"
        " people?\n/exit\nnever\n"
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    code, out, err = run(capfd, "chat", demo_model, "--template", "llama2", "--max-new-tokens", "6")
    loaded, tokenizer = quantkit.load(demo_model)
    session = quantkit.ChatSession(
        loaded, tokenizer, quantkit.chat_format(demo_model, tokenizer, "llama2"), max_new_tokens=6
    )
    expected = ["".join(session.ask(text)) for text in ("The people?", "And the Congress?")]
    session.reset()
    expected.append("".join(session.ask("Größe 日本語")))
    session.system = "Be brief."
    expected.append("".join(session.ask("The people?")))
    assert (code, err) == (0, "")
    assert out == "".join(answer + "\n" for answer in expected)


@pytest.mark.slow
def test_a_pipe_through_the_command(demo_model: Path) -> None:
    command = [sys.executable, "-m", "quantkit.cli", "chat", demo_model, "--template", "llama2"]
    options = ["--max-new-tokens", "6", "--stop", "Mr"]
    ran = subprocess.run(
        [*command, *options], input=b"The people?\n", capture_output=True, cwd="/", check=True
    )
    whole = _answer(demo_model, "The people?")
    assert ran.stdout.decode() == whole.split("Mr")[0] + "\n"
    assert ran.stderr == b""


@pytest.mark.parametrize(
    ("line", "code", "reported"),
    [
        (b"/Reset now\n", 2, "found 'now'"),
        (b"\xff\xfe\n", 2, "found line 1, expected UTF-8"),
        (b"[INST]\n", 2, "[INST]"),
        (b"word " * 9000 + b"\n", 2, "context"),
    ],
)
def test_what_cannot_be_answered_ends_a_pipe(
    line: bytes,
    code: int,
    reported: str,
    demo_model: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    exit_code, out, err = run(capfd, "chat", demo_model, "--template", "llama2")
    assert (exit_code, out, err.count("\n")) == (code, "", 1)
    assert reported in err


def test_a_path_is_no_command(
    demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/etc/passwd: what is it?\n")))
    assert run(capfd, "chat", demo_model, "--template", "llama2", "--max-new-tokens", "2")[0] == 0


def test_a_line_of_a_pipe_that_is_no_command_is_a_question(
    demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        b"/people of what?\n/RESET\n//people of what?\n/reset\n//reset the people\n/reset\n// the"
        b" people\n"
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    code, out, err = run(capfd, "chat", demo_model, "--template", "llama2", "--max-new-tokens", "6")
    people = _answer(demo_model, "/people of what?")
    answers = [
        people,
        people,
        _answer(demo_model, "/reset the people"),
        _answer(demo_model, "// the people"),
    ]
    assert (code, out) == (0, "".join(answer + "\n" for answer in answers))
    assert err.startswith("quantkit: note: /people ")
    assert err.count("\n") == 1
    assert "//people" in err


@pytest.mark.parametrize(
    ("closed", "code", "reported"), [("<&-", 0, ""), (">&-", 5, "standard output")]
)
def test_streams_that_are_closed(closed: str, code: int, reported: str, demo_model: Path) -> None:
    command = f'exec "$@" {closed}'
    arguments = forked.quantkit("chat", demo_model, "--template", "llama2")
    done = subprocess.run(
        ["sh", "-c", command, "sh", *arguments],
        input=b"",
        capture_output=True,
        cwd="/",
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (
        code,
        b"",
        1 if reported else 0,
    )
    assert reported in done.stderr.decode()


def test_a_model_without_a_template_is_reported_what_to_do(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    code, _, err = run(capfd, "chat", demo_model)
    assert code == 2
    assert err.startswith(f"quantkit: error: {demo_model}: ")
    assert "--template llama2" in err
    quantkit.convert(demo_model, tmp_path / "hf", template="llama2", source_check=False)
    oracle.edit_json(tmp_path / "hf" / "generation_config.json", do_sample="maybe")
    code, _, err = run(capfd, "chat", tmp_path / "hf")
    assert code == 3
    assert "'do_sample'" in err


def test_a_context_that_cannot_be_is_refused(
    demo_model: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The people?\n")))
    for context in (-3, 0, 10**6):
        code, _, err = run(capfd, "chat", demo_model, "--template", "llama2", "--context", context)
        assert code == 2
        assert err.startswith("quantkit: error: --context ")
        assert f"found {context}" in err


def test_tokens_are_drawn_as_the_folder_says_by_default(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantkit.convert(demo_model, tmp_path / "hf", template="llama2", source_check=False)

    def said(*options: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The people?\n")))
        code, out, _ = run(
            capfd, "chat", tmp_path / "hf", "--max-new-tokens", "12", "--seed", "3", *options
        )
        assert code == 0
        return out

    greedy = said()
    oracle.edit_json(tmp_path / "hf" / "generation_config.json", do_sample=True, temperature=1.5)
    drawn = said()
    assert drawn != greedy
    assert said() == drawn
    assert said("--temperature", "0") == greedy
    assert said("--top-k", "1") == greedy


def test_ctrl_c_ends_an_answer_and_not_the_program(demo_model: Path, tmp_path: Path) -> None:
    command = forked.command(
        "-c", _ENDLESS, "chat", demo_model, "--template", "llama2", "--max-new-tokens", "40"
    )
    terminal = Terminal(*command, cwd=tmp_path)
    assert "/help lists the commands, Ctrl-D exits" in terminal.wait_for(READY)
    terminal.type(
        "Te people?\x01\x1b[C\x1b[C\x7fhe\x05\r"
    )  # to the start, right twice, back, "he", to the end
    terminal.wait_for("The people?")
    terminal.wait_for("<waits>")
    terminal.type("\x03")
    terminal.wait_for(READY)
    terminal.type("And the Congress?\r")
    terminal.wait_for("And the Congress?")
    reported = terminal.wait_for(READY)
    assert "the answer was cut off at the maximum number of tokens" in reported
    terminal.type("\x04")
    code, got = terminal.end()
    assert code == 0
    assert "Traceback" not in got


def test_ctrl_c_ends_a_question_that_is_not_ready(demo_model: Path, tmp_path: Path) -> None:
    command = forked.command(
        "-c", _NEVER_READY, "chat", demo_model, "--template", "llama2", "--max-new-tokens", "6"
    )
    terminal = Terminal(*command, cwd=tmp_path)
    terminal.wait_for(READY)
    terminal.type("The people?\r")
    terminal.wait_for("<waits>")
    terminal.type("\x03")
    assert "the question was stopped before its answer began, and is dropped" in terminal.wait_for(
        READY
    )
    terminal.type("And the Congress?\r")
    assert _shown(_answer(demo_model, "And the Congress?")) in _shown(terminal.wait_for(READY))
    terminal.type("\x04")
    assert terminal.end()[0] == 0


def test_a_system_prompt_that_the_template_drops_is_refused(
    demo_model: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    quantkit.convert(demo_model, folder, source_check=False)
    template = (
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    for options, expected in (((), 0), (("--system", "Be brief."), 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The people?\n")))
        code, _, err = run(capfd, "chat", folder, "--max-new-tokens", "2", *options)
        assert code == expected, err
    assert "messages[0].content" in err


def test_an_answer_does_not_drive_the_terminal(demo_model: Path, tmp_path: Path) -> None:
    terminal = Terminal(
        *forked.command("-c", _DRIVES, "chat", demo_model, "--template", "llama2"), cwd=tmp_path
    )
    terminal.wait_for(READY)
    terminal.type("The people?\r")
    assert "a\\x1b]0;title\\x07\\x9b2J\\rb\n\tc\\ud800\n" in terminal.wait_for(READY)
    terminal.type("\x04")
    assert terminal.end()[0] == 0


def test_sigterm_ends_the_program_at_its_prompt(demo_model: Path, tmp_path: Path) -> None:
    terminal = Terminal(*forked.quantkit("chat", demo_model, "--template", "llama2"), cwd=tmp_path)
    terminal.wait_for(READY)
    terminal.signal(signal.SIGTERM)
    code, got = terminal.end()
    assert code == 143
    assert got.endswith("quantkit: interrupted\r\n")


def test_sigterm_ends_the_program_while_its_prompt_begins(demo_model: Path, tmp_path: Path) -> None:
    terminal = Terminal(
        *forked.command("-c", _TERMINATED, "chat", demo_model, "--template", "llama2"), cwd=tmp_path
    )
    code, got = terminal.end()
    assert code == 143
    assert got.endswith("quantkit: interrupted\r\n")
    assert "Warning" not in got


def test_what_else_is_typed(demo_model: Path, tmp_path: Path) -> None:
    command = forked.quantkit("chat", demo_model, "--template", "llama2", "--max-new-tokens", "6")
    terminal = Terminal(*command, cwd=tmp_path)
    terminal.wait_for(READY)
    for typed, reported in (
        ("/help\r", "start a new conversation"),
        ("/nonsense\r", "quantkit: error: unknown command (found /nonsense"),
        ("/reset now\r", "quantkit: error: /reset takes no argument (found 'now')"),
        ("/RESET\r", "The conversation starts again."),
        ("\x1b[200~/system\nBe brief.\x1b[201~\r", "The system prompt is set."),
        ("/system\r", "There is no system prompt."),
        ("\x1b[MZZZ/reset\r", "The conversation starts again."),  # what a mouse sends, in part
        ("\r", ""),
        ("thrown away\x03", ""),
        ("\x03", "Ctrl-D exits."),
        ("Größe 日本語 🚀\r", _shown(_answer(demo_model, "Größe 日本語 🚀"))),
        ("/reset\r", "The conversation starts again."),
        ("/system Be brief.\r", "The system prompt is set."),
        ("The people?\r", _shown(_answer(demo_model, "The people?", system="Be brief."))),
        (
            "\x1b[A\x1b[A\r",
            "The system prompt is set.",
        ),  # the line before the last, from the history
        ("[INST]\r", "holds a tag of the chat format"),
        ("/system\r", "There is no system prompt."),
    ):
        terminal.type(typed)
        assert reported in _shown(terminal.wait_for(READY)), typed
    terminal.type("/exit\r")
    assert terminal.end()[0] == 0


@pytest.mark.slow
def test_processes_share_a_conversation(demo_model: Path) -> None:
    command = [
        "chat",
        demo_model,
        "--template",
        "llama2",
        "--max-new-tokens",
        "6",
        "--dtype",
        "fp32",
    ]
    lines = b"The people?\nAnd the Congress?\n"
    ran = subprocess.run(
        forked.launched(2, *command), input=lines, capture_output=True, cwd="/", check=True
    )
    alone = forked.quantkit(*command)
    assert (
        ran.stdout
        == subprocess.run(alone, input=lines, capture_output=True, cwd="/", check=True).stdout
    )
