"""Prompts as people give them, to Python and to the command, and what they see of the answer."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from command import Capture, run
from rows import read_late
from terminal import screen

import quantkit
from quantkit.cli.main import quantkit as root
from quantkit.errors import RequestError
from quantkit.model.decoder import Decoder
from quantkit.runtime.engine import Engine
from quantkit.runtime.generate import Pace
from quantkit.runtime.request import MAX_NEW_TOKENS
from quantkit.runtime.scheduler import READ_LAG
from quantkit.text.tokenizer import Tokenizer

PROMPT = "My fellow citizens"
NEW = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> tuple[Decoder, Tokenizer]:
    return quantkit.load(demo_model, device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def answer(loaded: tuple[Decoder, Tokenizer]) -> str:
    """What the model says after the prompt."""
    model, tokenizer = loaded
    ids = tokenizer.encode(PROMPT)
    new = list(quantkit.generate(model, ids, max_new_tokens=12))
    return tokenizer.decode([*ids, *new]).removeprefix(PROMPT)


# Python


def test_a_stream_gives_the_text_in_pieces(loaded: tuple[Decoder, Tokenizer], answer: str) -> None:
    pieces = list(quantkit.stream(*loaded, PROMPT, max_new_tokens=12))
    assert "".join(pieces) == answer
    assert len(pieces) > 5
    assert all(pieces)


def test_a_stream_takes_token_ids_and_an_engine(
    loaded: tuple[Decoder, Tokenizer], answer: str
) -> None:
    model, tokenizer = loaded
    ids = tokenizer.encode(PROMPT)
    for one in (model, Engine(model, 100)):
        for prompt in (ids, torch.tensor(ids)):
            assert "".join(quantkit.stream(one, tokenizer, prompt, max_new_tokens=12)) == answer


def test_special_tokens_are_plain_text_in_a_stream_unless_requested(
    loaded: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = loaded
    requested: list[bool] = []
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, *, specials: requested.append(specials) or encode(text)
    )
    quantkit.stream(model, tokenizer, "x")
    quantkit.stream(model, tokenizer, "x", specials=True)
    assert requested == [False, True]


HOLDERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "[T]": torch.tensor,
    "[1, T]": lambda ids: torch.tensor([ids]),
    "int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "numpy": np.array,
    "numpy's numbers": lambda ids: [np.int64(one) for one in ids],
    "nested": lambda ids: [ids],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_token_ids_are_taken_from_whatever_holds_them(
    holder: str, loaded: tuple[Decoder, Tokenizer]
) -> None:
    model, tokenizer = loaded
    ids = tokenizer.encode(PROMPT)
    expected = list(quantkit.generate(model, ids, max_new_tokens=5))
    assert list(quantkit.generate(model, HOLDERS[holder](ids), max_new_tokens=5)) == expected


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (
            PROMPT,
            (
                "the prompt is a string",
                "tokenizer.encode(text)",
                "quantkit.stream(model, tokenizer, text)",
            ),
        ),
        (b"bytes", ("the prompt is a string",)),
        ([1.0, 2.0], ("not a list of token ids", "found list", "quantkit.stream")),
        (torch.tensor([1.0, 2.0]), ("not a list of token ids", "found Tensor")),
        (["a", "b"], ("not a list of token ids",)),
        (7, ("not a list of token ids", "found int")),
        (torch.tensor(7), ("not a list of token ids",)),
        ({"input_ids": [1]}, ("not a list of token ids", "found dict")),
        (None, ("not a list of token ids", "found NoneType")),
        (torch.ones(2, 3, dtype=torch.long), ("one prompt at a time", "found 2 prompts")),
        (torch.ones(1, 2, 3, dtype=torch.long), ("not a list of token ids",)),
        ([], ("the prompt is empty",)),
        ([[]], ("the prompt is empty",)),
    ],
)
def test_what_is_no_prompt_is_refused_at_once_with_the_way_out(
    prompt: Any, words: tuple[str, ...], loaded: tuple[Decoder, Tokenizer]
) -> None:
    with pytest.raises(RequestError) as caught:
        quantkit.generate(loaded[0], prompt)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_empty_text_is_refused_at_once(loaded: tuple[Decoder, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        quantkit.stream(*loaded, "")


@pytest.mark.parametrize(
    ("prompt", "new", "hint"),
    [
        (4095, 2, "use a shorter prompt"),
        (4090, 100, "use a shorter prompt"),
        (5000, 1, "use a shorter prompt"),
        (4000, 100, "lower `max_new_tokens`"),
        (1, 5000, "lower `max_new_tokens`"),
    ],
)
def test_what_to_do_about_too_many_tokens_depends_on_the_prompt(
    prompt: int, new: int, hint: str, loaded: tuple[Decoder, Tokenizer]
) -> None:
    with pytest.raises(RequestError, match=r"exceed the model's context") as caught:
        quantkit.generate(loaded[0], [5] * prompt, max_new_tokens=new)
    assert caught.value.hint == hint


def test_without_a_number_a_hundred_tokens_come(loaded: tuple[Decoder, Tokenizer]) -> None:
    model, tokenizer = loaded
    (option,) = (one for one in root.commands["generate"].params if one.name == "max_new_tokens")
    assert option.default == MAX_NEW_TOKENS
    whole = list(quantkit.generate(model, tokenizer.encode(PROMPT), max_new_tokens=MAX_NEW_TOKENS))
    assert list(quantkit.generate(model, tokenizer.encode(PROMPT))) == whole


LEFT_EARLY = """
import sys
import quantkit
from quantkit.runtime.engine import Engine
model, tokenizer = quantkit.load(sys.argv[1], device="cpu")
ids = tokenizer.encode("My fellow citizens")
running = [
    quantkit.stream(model, tokenizer, ids), quantkit.generate(model, ids),
    quantkit.generate(Engine(model, 200, draft=model, draft_tokens=3), ids),
]
for one in running:
    for _ in one:
        break
"""


@pytest.mark.slow
def test_what_is_left_early_says_nothing_at_the_end_of_a_program(demo_model: Path) -> None:
    command = [sys.executable, "-c", LEFT_EARLY, str(demo_model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["stream", "generate"])
def test_what_is_left_early_can_be_closed_and_leaves_the_thread_as_it_was(
    name: str, loaded: tuple[Decoder, Tokenizer]
) -> None:
    model, tokenizer = loaded
    ids = tokenizer.encode(PROMPT)
    running = (
        quantkit.stream(model, tokenizer, ids)
        if name == "stream"
        else quantkit.generate(model, ids)
    )
    next(running)
    assert not torch.is_inference_mode_enabled()
    running.close()
    assert list(running) == []


def test_the_first_token_is_not_kept_back(
    loaded: tuple[Decoder, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs ahead of the tokens that the host reads."""
    read_late(monkeypatch)
    engine = Engine(loaded[0], 100, draft_tokens=0)
    steps: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda *given: steps.append(1) or step(*given))
    tokens = quantkit.generate(engine, loaded[1].encode(PROMPT), max_new_tokens=20)
    assert [(next(tokens), len(steps))[1] for _ in range(3)] == [1, 2 + READ_LAG, 3 + READ_LAG]


@pytest.mark.parametrize(
    ("arrivals", "at_once", "line"),
    [
        ([], 1, "0 tokens"),
        ([0.25], 1, "1 token, first token after 0.25 s"),
        ([0.5, 0.75, 1.0], 1, "3 tokens, 4.0 tokens/s, first token after 0.50 s"),
        ([2.0, 2.0, 2.5, 2.5], 2, "4 tokens, 4.0 tokens/s, first token after 2.00 s"),
        ([2.0, 2.0], 2, "2 tokens, first token after 2.00 s"),
    ],
)
def test_the_pace_is_of_the_tokens_after_the_first(
    arrivals: list[float], at_once: int, line: str
) -> None:
    ticks = iter([10.0, *(10 + one for one in arrivals)])
    pace = Pace(at_once=at_once, clock=lambda: next(ticks))
    tokens = list(range(len(arrivals)))
    assert list(pace.time_tokens(tokens)) == tokens
    assert pace.line() == line


# The command


def _piped(text: bytes, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "quantkit.cli", "generate", *map(str, arguments)],
        input=text,
        capture_output=True,
        check=False,
        cwd="/",
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def test_the_prompt_is_given_in_place_or_named(
    demo_model: Path, answer: str, tmp_path: Path, capfd: Capture
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(f"{PROMPT}\n")
    expected = (0, f"{PROMPT}{answer}\n", "")
    for given in ([PROMPT], ["--prompt", PROMPT], ["--prompt-file", str(file)]):
        assert run(capfd, "generate", demo_model, *given, *NEW, "--dtype", "fp32") == expected


@pytest.mark.slow
@pytest.mark.parametrize("given", [["-"], ["--prompt-file", "-"]], ids=" ".join)
def test_a_dash_reads_stdin(given: list[str], demo_model: Path, answer: str) -> None:
    done = _piped(f"{PROMPT}\n".encode(), demo_model, *given, *NEW, "--dtype", "fp32")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{PROMPT}{answer}\n", "")


def test_a_prompt_is_taken_as_the_shell_gives_it(
    demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    """Backslashes stay; of a file only the last new line goes."""
    (tmp_path / "p").write_bytes(b"a\\n\n\n")
    assert run(capfd, "generate", demo_model, "a\\n", *NEW)[1].startswith("a\\n")
    assert run(capfd, "generate", demo_model, "--prompt", "-", *NEW)[1].startswith("-")
    assert run(capfd, "generate", demo_model, "--prompt-file", tmp_path / "p", *NEW)[1].startswith(
        "a\\n\n"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            [],
            (
                "no prompt is given",
                'quantkit generate DIR "Once upon a time"',
                "--prompt-file FILE",
            ),
        ),
        (
            ["x", "--prompt", "y"],
            ("the prompt is given twice", "found PROMPT and --prompt, expected one of them"),
        ),
        (["-", "--prompt-file", "y"], ("found PROMPT and --prompt-file",)),
        (["--prompt", "x", "--prompt-file", "y"], ("found --prompt and --prompt-file",)),
        ([""], ("the prompt is empty",)),
        (["--prompt-file", "{tmp}/none"], ("{tmp}/none: the prompt cannot be read: No such file",)),
        (["--prompt-file", "{tmp}"], ("{tmp}: the prompt cannot be read",)),
        (["--prompt-file", "{tmp}/empty"], ("{tmp}/empty: the prompt is empty",)),
        (
            ["--prompt-file", "{tmp}/latin"],
            ("{tmp}/latin: the prompt is not UTF-8 text", "found byte 2"),
        ),
    ],
    ids=repr,
)
def test_a_prompt_that_is_none_is_refused(
    given: list[str], words: tuple[str, ...], demo_model: Path, tmp_path: Path, capfd: Capture
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"na\xefve")
    code, out, err = run(
        capfd, "generate", demo_model, *(one.format(tmp=tmp_path) for one in given)
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(word.format(tmp=tmp_path) in err for word in words), err


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["", "x --prompt-file y", "x --draft-tokens 2", "x --tp 2", "x --backend xla --eager"],
)
def test_options_that_do_not_go_together_are_reported_before_torch_is_imported(
    options: str,
) -> None:
    code = (
        "import sys\n"
        "from quantkit.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n"
        "    print(stop.code, 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "generate", "somewhere", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.stdout == "2 False\n", done.stderr
    assert done.stderr.startswith("quantkit: error: ")


def test_a_prompt_that_stands_before_the_model_is_reported(
    demo_model: Path, capfd: Capture
) -> None:
    code, out, err = run(capfd, "generate", "A prompt", demo_model)
    assert (code, out) == (2, "")
    assert (
        err == "quantkit: error: the model comes first, then the prompt; quantkit generate"
        f" {demo_model} PROMPT\n"
    )
    code, _, err = run(capfd, "generate", "A prompt", "another")
    assert (code, err) == (2, "quantkit: error: A prompt: does not exist\n")


@pytest.mark.slow
def test_of_several_processes_the_first_reads_the_prompt(
    demo_model: Path, answer: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    command = "from quantkit.cli.main import main; main()"
    options = ["--prompt-file", str(file), "--dtype", "fp32", *NEW]
    first, second = forked.group(2, command, "generate", demo_model, *options)
    assert (first.returncode, first.stdout) == (0, f"{PROMPT}{answer}\n"), first.stderr
    assert (second.returncode, second.stdout) == (0, ""), second.stderr


_WAITING = """
import sys
import quantkit.runtime.generate
def pieces(tokenizer, prompt, tokens, stop=()):
    yield " one"
    sys.stdin.readline()
    yield " two"
quantkit.runtime.generate.text_pieces = pieces
from quantkit.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_text_appears_piece_by_piece(demo_model: Path) -> None:
    """Here the second comes only once the first has been read."""
    command = [sys.executable, "-c", _WAITING, "generate", str(demo_model), "x"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd="/"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        giving_up = threading.Timer(
            300, process.kill
        )  # what is not shown would be waited for for ever
        giving_up.start()
        shown = b""
        while len(shown) < len("x one") and (part := process.stdout.read(100)):
            shown += part
        assert shown == b"x one"
        process.stdin.write(b"go on\n")
        assert process.stdout.read() == b" two\n"
        giving_up.cancel()


def _on_a_terminal(*arguments: str | Path) -> Iterator[str]:
    """What a command shows on a terminal, read by read."""
    there, here = pty.openpty()
    command = [sys.executable, "-m", "quantkit.cli", *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=here, stderr=here, cwd="/"
    ) as process:
        os.close(here)
        try:
            while part := os.read(there, 4096):
                yield part.decode(errors="replace")
        except OSError:  # how the end is told
            pass
        finally:
            os.close(there)
        assert process.wait() == 0


@pytest.mark.slow
def test_on_a_terminal_loading_is_shown_until_text_appears_and_the_last_line_reports_the_pace(
    demo_model: Path, answer: str
) -> None:
    shown = "".join(_on_a_terminal("generate", demo_model, PROMPT, *NEW, "--dtype", "fp32"))
    begins = shown.index(PROMPT)
    assert "load: " in shown[:begins]
    assert "load: " not in shown[begins:]
    text, _, last = "\n".join(screen(shown)).rstrip("\n").rpartition("\n")
    memory, _, continued = text.partition(PROMPT)
    assert memory.startswith("memory to run: ")
    assert continued == answer
    assert last.startswith("12 tokens, ")
    assert last.endswith(" s")
    assert " tokens/s, first token after " in last
