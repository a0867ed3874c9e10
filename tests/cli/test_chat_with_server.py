"""``quantkit chat --url``: the conversation is that of ``quantkit chat PATH``, and a server
answers.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import forked
import pytest
from command import Capture, run
from fake_api import Reply, as_json, fake_api, piece, said
from partial import no_hang
from terminal import READY, Terminal


@pytest.fixture(autouse=True)
def _ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("QUANTKIT_API_KEY", raising=False)
    with no_hang():
        yield


def _type(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))


def test_lines_of_a_pipe_are_answered_and_nothing_else_is_printed(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _type(monkeypatch, "Who?\n\nAnd?\n/reset\n//reset it\n/system Be brief.\nThen?\n/exit\nnever\n")
    monkeypatch.setenv("QUANTKIT_API_KEY", "from the environment")
    options = [
        "--max-new-tokens",
        "9",
        "--temperature",
        "0.5",
        "--stop",
        "x",
        "--stop",
        "y",
        "--system",
        "Be long.",
    ]
    with fake_api(lambda body: said("an", "swer", finish="length", usage=(3, 2))) as api:
        assert run(capfd, "chat", "--url", api.url, *options) == (0, "answer\n" * 4, "")
    _, *answered = api.requests
    assert {headers["authorization"] for _, _, headers in api.requests} == {
        "Bearer from the environment"
    }
    sent: list[dict[str, Any]] = [body for _, body, _ in answered]
    assert [(one["max_tokens"], one["temperature"], one["stop"]) for one in sent] == [
        (9, 0.5, ["x", "y"])
    ] * 4
    systems = [one["messages"][0]["content"] for one in sent]
    assert systems == ["Be long."] * 3 + ["Be brief."]
    questions = [[message["content"] for message in one["messages"][1:]] for one in sent]
    assert questions == [
        ["Who?"],
        ["Who?", "answer", "And?"],
        ["/reset it"],
        ["/reset it", "answer", "Then?"],
    ]


def test_the_server_chooses_what_is_not_requested(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _type(monkeypatch, "Who?\n")
    with fake_api(lambda body: said("x")) as api:
        assert run(capfd, "chat", "--url", api.url, "--model", "mine")[:2] == (0, "x\n")
    ((_, body, headers),) = api.requests  # the models are not listed, as one is named
    assert set(body) == {"model", "messages", "stream", "stream_options"}
    assert body["model"] == "mine"
    assert "authorization" not in headers


def test_an_error_ends_a_pipe(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    _type(monkeypatch, "Who?\nAnd?\n")
    with fake_api(lambda body: as_json(401, {"error": {"message": "no"}})) as api:
        code, out, err = run(capfd, "chat", "--url", api.url)
    assert (code, out) == (2, "")
    assert err.startswith(f"quantkit: error: {api.url} ")
    assert err.count("\n") == 1
    assert ": no;" in err
    assert "--api-key" in err


SERVER = ["--url", "http://127.0.0.1:1"]
REFUSED_OPTIONS: list[tuple[list[str], list[str]]] = [
    ([], ["PATH", "--url"]),
    (["DIR", *SERVER], ["PATH", "--url"]),
    (["DIR", "--model", "x"], ["--model", "--url"]),
    (["DIR", "--api-key", "x"], ["--api-key", "--url"]),
    (["--url", "nowhere"], ["--url", "found 'nowhere'"]),
    ([*SERVER, "--api-key", "ä"], ["--api-key", "ASCII"]),
    ([*SERVER, "--temperature", "-1"], ["temperature", "found -1"]),
    ([*SERVER, "--max-new-tokens", "0"], ["found 0"]),
    ([*SERVER, "--template", "llama2"], ["--template", "PATH"]),
    ([*SERVER, "--context", "9"], ["--context", "PATH"]),
    ([*SERVER, "--dtype", "bf16"], ["--dtype", "PATH"]),
    ([*SERVER, "--backend", "reference"], ["--backend", "PATH"]),
    ([*SERVER, "--allow-slow"], ["--allow-slow", "PATH"]),
    ([*SERVER, "--device", "cpu"], ["--device", "PATH"]),
    ([*SERVER, "--int8-cache"], ["--int8-cache", "PATH"]),
    ([*SERVER, "--eager"], ["--compile/--eager", "PATH"]),
    ([*SERVER, "--weights", "bin"], ["--weights", "PATH"]),
    ([*SERVER, "--threads", "1"], ["--threads", "PATH"]),
]


def test_options_that_do_not_fit_are_refused_by_name(capfd: Capture) -> None:
    for options, names in REFUSED_OPTIONS:
        code, out, err = run(capfd, "chat", *options)
        assert (code, out, err.count("\n")) == (2, "", 1), options
        assert all(name in err for name in names), options


def test_several_processes_do_not_share_a_server(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run(capfd, "chat", "--url", "http://127.0.0.1:1")
    assert code == 2
    assert "--url" in err
    assert "torchrun" in err


def test_a_key_that_others_can_read_is_a_warning(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _type(monkeypatch, "Who?\n")
    code, _, err = run(capfd, "chat", "--url", "http://no.invalid/v1", "--api-key", "secret")
    assert code == 2
    warning, error = err.splitlines()
    assert warning.startswith("quantkit: warning: ")
    assert "http://no.invalid/v1" in warning
    assert "https" in warning
    assert error.startswith("quantkit: error: http://no.invalid/v1 ")
    assert "secret" not in err


def _answer(body: Any) -> Reply:
    question = body["messages"][-1]["content"]
    if question == "Endless?":
        return Reply(parts=(time.sleep(0.01) or piece("on ") for _ in repeat(None)))
    if question == "Never?":
        return Reply(parts=(time.sleep(0.05) or b": waits\n\n" for _ in repeat(None)))
    if question == "Too many?":
        return as_json(429, {"error": {"message": "busy\x1b[2J"}}, {"Retry-After": "3"})
    texts = [message["content"] for message in body["messages"]]
    return said(
        f"{len(texts)} messages\x07",
        finish="length" if question == "Long?" else "stop",
        usage=(5, 2),
    )


@pytest.mark.slow
@pytest.mark.processes
def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    with fake_api(_answer) as api:
        terminal = Terminal(*forked.quantkit("chat", "--url", api.url), cwd=tmp_path)
        assert f"one at {api.url}: /help lists the commands, Ctrl-D exits" in terminal.wait_for(
            READY
        )
        for typed, reported in (
            ("Who?\r", "1 messages\\x07\nquantkit: note: 2 tokens in 0."),
            (
                "Too many?\r",
                f"quantkit: error: {api.url} is receiving too many requests: busy\\x1b[2J;",
            ),
            (
                "Long?\r",
                (
                    "3 messages\\x07\nquantkit: note: the answer was cut off at the maximum number"
                    " of tokens"
                ),
            ),
            ("/help\r", "start a new conversation"),
            ("/reset\r", "The conversation starts again."),
            ("/system Be brief.\r", "The system prompt is set."),
            ("Who?\r", "2 messages\\x07"),
        ):
            terminal.type(typed)
            shown = terminal.wait_for(READY)
            assert reported in " ".join(shown.split(" ")), (typed, shown)
        for typed, seen in (("Endless?\r", "on on on "), ("Never?\r", "Never?")):
            api.gone.clear()
            terminal.type(typed)
            terminal.wait_for(seen)
            while api.requests[-1][1]["messages"][-1]["content"] != typed.strip():
                time.sleep(0.02)
            time.sleep(0.2)  # the answer is being waited for
            terminal.type("\x03")
            shown = terminal.wait_for(READY)
            stopped = "the question was stopped before its answer began, and is dropped"
            assert (stopped in " ".join(shown.split())) == (typed == "Never?\r")
            assert api.gone.wait(20)
        terminal.type("Who?\r")
        assert "6 messages" in terminal.wait_for(READY)  # with the beginning of the endless answer
        terminal.type("\x04")
        code, got = terminal.end()
    assert code == 0
    assert "Traceback" not in got
    assert "\x07" not in got
