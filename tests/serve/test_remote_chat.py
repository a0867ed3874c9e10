"""A conversation with a server: its answers are those of `ChatSession`, and what goes wrong is
one line.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from fake_api import Reply, as_json, fake_api, piece, said

import quantkit
from quantkit.errors import RequestError, UnreachableError
from quantkit.serve.client import Server
from quantkit.serve.remote_chat import RemoteChat

STREAM = {"Content-Type": "text/event-stream"}


@pytest.mark.slow
def test_a_server_answers_as_a_session_does(address: str, model: Path, template: Path) -> None:
    decoder, tokenizer = quantkit.load(model, backend="cpu-exact")
    chat = quantkit.chat_format(model, tokenizer, str(template))
    session = quantkit.ChatSession(
        decoder, tokenizer, chat, max_new_tokens=12, context=512, system="Be brief."
    )
    remote = RemoteChat(
        Server(address), system="Be brief.", options={"max_tokens": 12, "temperature": 0}
    )
    assert remote.model == "demo"
    for question in ("The people?", "And the Congress?"):
        assert "".join(remote.ask(question)) == "".join(session.ask(question)).removeprefix(" ")
        assert remote.finish_reason == session.finish_reason == "length"
        session.messages[-1]["content"] = session.messages[-1]["content"].removeprefix(" ")
        assert remote.messages == session.messages
        assert remote.usage is not None
        assert remote.usage.completion_tokens == 12
        assert 0 < remote.usage.first_seconds <= remote.usage.seconds
    remote.reset()
    assert (remote.messages, remote.finish_reason, remote.usage) == ([], None, None)


def test_what_is_sent() -> None:
    with fake_api(lambda body: said("a", "b", usage=(7, 2))) as api:
        chat = RemoteChat(Server(f"{api.url}/", "a key"), system="Be brief.", options={"top_k": 4})
        assert list(chat.ask("Who?")) == ["a", "b"]
        assert list(chat.ask("And?")) == ["a", "b"]
    (listed, _, _), first, (path, body, headers) = api.requests
    assert (listed, first[0], path) == ("/v1/models", *["/v1/chat/completions"] * 2)
    assert headers["authorization"] == "Bearer a key"
    assert body == {
        "model": "one",
        "top_k": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": "ab"},
            {"role": "user", "content": "And?"},
        ],
    }
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (7, 2)


@pytest.mark.parametrize(
    "parts",
    [
        [
            b": ping\r\n\r\nevent: x\r\ndata:",
            piece("a")[5:].replace(b"\n", b"\r\n"),
            piece("b", finish="stop"),
        ],
        [
            piece("a")[:20],
            piece("a")[20:] + piece(None),
            piece("b"),
            piece(finish="stop"),
            b"data: [DONE]\n\nmore",
        ],
    ],
)
def test_events_are_read_however_they_are_cut(parts: list[bytes]) -> None:
    with fake_api(lambda body: Reply(parts=parts)) as api:
        assert list(RemoteChat(Server(api.url), "one").ask("Who?")) == ["a", "b"]


def _error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": code}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (
            as_json(401, _error("no\x1b]0;x\x07pe")),
            RequestError,
            r"requires an API key: no\x1b]0;x\x07pe; set `api_key`",
        ),
        (as_json(400, _error("`n` is\nwrong")), RequestError, "refuses the request: 'n' is wrong"),
        (as_json(422, {"detail": "odd"}), RequestError, "refuses the request: odd"),
        (
            as_json(404, _error("no such", "model_not_found")),
            RequestError,
            "not have this model: no such; `model`",
        ),
        (
            as_json(404, {}),
            RequestError,
            "does not have this path: status 404 Not Found; check the address",
        ),
        (
            as_json(429, _error("busy"), {"Retry-After": "7"}),
            UnreachableError,
            "busy; try again in 7 s",
        ),
        (
            as_json(503, _error("down")),
            UnreachableError,
            "has failed: down (found status 503); try again later",
        ),
        (
            Reply(200, [b"<html>"], {"Content-Type": "text/html"}),
            RequestError,
            "(found 'text/html, not an event stream')",
        ),
        (
            Reply(parts=[b"data: <html>\n\n"]),
            RequestError,
            "does not answer with OpenAI's API (found b' <html>')",
        ),
        (Reply(parts=[b'data: {"choices": 3}\n\n']), RequestError, "(found {'choices': 3})"),
        (
            Reply(parts=[b"data: " + b"[" * 100_000 + b"\n\n"]),
            RequestError,
            "does not answer with OpenAI's API",
        ),
        (Reply(parts=[b"data: " + b"x" * (1 << 20)]), RequestError, "an unterminated line"),
        (
            Reply(parts=[piece("a")]),
            UnreachableError,
            "lost the connection before the answer ended",
        ),
        (
            Reply(parts=[piece("a"), piece("b")[:30]]),
            UnreachableError,
            "lost the connection before the answer ended",
        ),
        (
            Reply(parts=[piece("a")], headers={**STREAM, "Content-Length": "999"}),
            UnreachableError,
            "lost the connection before the answer ended: it was closed; try again",
        ),
        (
            Reply(parts=[b'data: {"error": {"message": "NaN"}}\n\n']),
            UnreachableError,
            "not finish the answer: NaN",
        ),
    ],
)
def test_what_goes_wrong_is_one_line(reply: Reply, kind: type[RequestError], message: str) -> None:
    replies = iter([said("x"), reply, said("y")])
    with fake_api(lambda body: next(replies)) as api:
        chat = RemoteChat(Server(api.url), "one")
        assert list(chat.ask("Who?")) == ["x"]
        with pytest.raises(RequestError) as raised:
            list(chat.ask("And?"))
        assert type(raised.value) is kind
        assert str(raised.value).startswith(f"{api.url} ")
        assert message in str(raised.value)
        assert [one["content"] for one in chat.messages] == [
            "Who?",
            "x",
        ]  # the question is forgotten
        assert list(chat.ask("Then?")) == ["y"]


@pytest.mark.slow
def test_a_redirect_is_not_followed() -> None:
    """The key stays with the server that it is for."""
    with fake_api(lambda body: said("x")) as other:
        away = Reply(307, [], {"Location": f"{other.url}/chat/completions"})
        with (
            fake_api(lambda body: away) as api,
            pytest.raises(RequestError, match="sends a redirect, which is not followed"),
        ):
            list(RemoteChat(Server(api.url, "secret"), "one").ask("Who?"))
    assert other.requests == []


def test_nobody_answers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            UnreachableError, match=f"^{url}/v1 cannot be reached: Connection refused; check"
        ):
            RemoteChat(Server(url))


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Le"]
)
def test_what_answers_is_no_server_of_the_web(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def once() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        threading.Thread(target=once).start()
        with pytest.raises(
            RequestError, match=r"^http://127\.0\.0\.1:\d+/v1 (lost the con|does not answer with O)"
        ):
            RemoteChat(Server(f"http://127.0.0.1:{listening.getsockname()[1]}"))


@pytest.mark.parametrize(
    "models", [as_json(200, {"data": []}), as_json(200, [1]), Reply(200, [b"hello"])]
)
def test_a_list_of_models_that_is_none(models: Reply) -> None:
    with (
        fake_api(lambda body: said("x"), models) as api,
        pytest.raises(RequestError, match="does not answer with OpenAI's API"),
    ):
        RemoteChat(Server(api.url))


def test_one_of_several_models_is_named() -> None:
    with fake_api(
        lambda body: said("x"), as_json(200, {"data": [{"id": "a"}, {"id": "b\x1b"}]})
    ) as api:
        with pytest.raises(
            RequestError, match=r"several models \(found 'a', 'b\\x1b'\); select one with `model`"
        ):
            RemoteChat(Server(api.url))
        assert list(RemoteChat(Server(api.url), "a").ask("Who?")) == ["x"]


@pytest.mark.slow
def test_the_oldest_messages_are_forgotten_when_the_context_is_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "quantkit")
    full = as_json(400, _error("too long", "context_length_exceeded"))
    with fake_api(lambda body: said("x") if len(body["messages"]) <= 5 else full) as api:
        chat = RemoteChat(Server(api.url), "one")
        for number in range(5):
            assert list(chat.ask(str(number))) == ["x"]
    assert [one["content"] for one in chat.messages] == ["2", "x", "3", "x", "4", "x"]
    assert caplog.text.count("the oldest questions and answers are forgotten") == 1
    with fake_api(lambda body: full) as api:
        chat = RemoteChat(Server(api.url), "one")
        chat.messages = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
        with pytest.raises(RequestError, match="too long"):
            list(chat.ask("Who?"))
        assert len(chat.messages) == 4


def _endless() -> Reply:
    return Reply(parts=(time.sleep(0.01) or piece("a") for _ in repeat(None)))


def _silent() -> Reply:
    def parts() -> Iterator[bytes]:
        yield b": waits\n\n"
        while True:
            time.sleep(0.05)
            yield b""  # nothing is sent, until the client has gone
            yield b": ping\n\n"

    return Reply(parts=parts())


@pytest.mark.slow
@pytest.mark.parametrize(("reply", "kept"), [(_endless, 3), (_silent, 0)])
def test_an_answer_that_is_stopped_ends_the_request(reply: Callable[[], Reply], kept: int) -> None:
    with fake_api(lambda body: reply()) as api:
        chat, said_so_far = RemoteChat(Server(api.url), "one"), list[str]()
        began = time.monotonic()
        for text in chat.ask(
            "Who?", interrupted=lambda: len(said_so_far) == 3 or time.monotonic() > began + 2
        ):
            said_so_far.append(text)
        assert api.gone.wait(20)
    assert (said_so_far, chat.finish_reason, chat.usage) == (["a"] * kept, None, None)
    expected = (
        [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "aaa"}]
        if kept
        else []
    )
    assert chat.messages == expected


def test_an_answer_that_is_left_ends_the_request() -> None:
    with fake_api(lambda body: _endless()) as api:
        chat = RemoteChat(Server(api.url), "one")
        pieces = chat.ask("Who?")
        assert next(pieces) == "a"
        pieces.close()
        assert api.gone.wait(20)
    assert [one["content"] for one in chat.messages] == ["Who?", "a"]


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host/v1?x=1",
        "http://host/v 1",
        "http://host\r\nX: y/v1",
        "http://höst",
        "http://user:pass@host/v1",
        "http://[::1",
        "",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match=r"`url` (is not valid|contains a user name)") as raised:
        Server(url)
    assert "pass" not in str(raised.value)


@pytest.mark.parametrize("key", ["", " ", "a\r\nX-Other: b", "schlüssel", "a\x1bb"])
def test_a_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with pytest.raises(RequestError, match="`api_key` cannot be sent") as raised:
        Server("http://127.0.0.1:8000", key)
    assert not key.strip() or key not in str(raised.value)


def test_a_key_is_exposed_without_encryption() -> None:
    for url in ("http://example.org/v1", "http://192.0.2.1"):
        assert Server(url, "key").exposes_key
        assert not Server(url).exposes_key
    for url in (
        "https://example.org/v1",
        "http://localhost:8000",
        "http://127.0.0.1",
        "http://[::1]:8000/v1",
    ):
        assert not Server(url, "key").exposes_key
    assert Server("http://[::1]:8000").url == "http://[::1]:8000/v1"
