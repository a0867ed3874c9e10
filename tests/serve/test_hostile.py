"""Requests that are meant to harm: each is refused in JSON, and none keeps the others waiting."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from served import started

from quantkit.errors import RequestError
from quantkit.prompts.prompt import Prompt, PromptFields
from quantkit.serve.app import application

CHAT = "/v1/chat/completions"
_JSON = (b"content-type", b"application/json")
MESSAGES = [{"role": "user", "content": "Who?"}]


def _answer(
    address: str, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize(
    ("path", "given", "status", "message"),
    [
        (
            CHAT,
            {"messages": MESSAGES, "response_format": _schema({"$ref": "#/\ud800"})},
            400,
            "(found #/\\ud800)",
        ),
        (CHAT, {"messages": MESSAGES, "response_format": _schema({"a" * 5000: 1})}, 400, "a ..."),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": _schema({"format": ["date"]})},
            400,
            "the format ['date']",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {"budget": 1}},
            400,
            "'budget' is reserved",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
            400,
            "is reserved",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}},
            400,
            "is reserved",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {"documents": [{}]}},
            400,
            "does not print documents",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {"continue_final_message": "\ud800"}},
            400,
            '"\\ud800"',
        ),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 10**4299},
            400,
            "'max_tokens' contains a number that is too",
        ),
        ("/v1/completions", {"prompt": "x", "stream": 0}, 400, "`stream` is of the wrong type"),
        (
            "/v1/completions",
            {"prompt": "x", "stream": True, "stream_options": []},
            400,
            "'stream_options' is of the",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "stop": [str(n) for n in range(257)]},
            400,
            "(found 257, expected at most",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "n": 129},
            400,
            "n is out of range (found 129, expected 1 to 128)",
        ),
        ("/tokenize", {"prompt": "x", "model": 5}, 400, "`model` is of the wrong type"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, 404, "the model 'gpt' is not served here"),
    ],
)
def test_odd_values_are_refused_by_name(
    path: str, given: Any, status: int, message: str, address: str
) -> None:
    found, answer = _answer(address, "POST", path, json.dumps(given).encode())
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
    assert message in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 1100


def test_only_too_long_a_prompt_has_the_code_of_that(address: str) -> None:
    for given, code in (({"max_tokens": 600}, "context_length_exceeded"), ({"context": 1}, None)):
        status, answer = _answer(
            address, "POST", "/v1/completions", json.dumps({"prompt": "x", **given}).encode()
        )
        assert (status, answer["error"]["code"]) == (400, code)


def test_an_empty_body_is_called_so(address: str) -> None:
    status, answer = _answer(address, "POST", "/v1/completions")
    assert (status, answer["error"]["message"]) == (
        400,
        "the body is empty (expected a JSON object)",
    )


def test_errors_do_not_say_where_the_template_is(address: str) -> None:
    given = {"messages": [{"role": "user", "content": "x" * (5 << 20)}]}
    status, answer = _answer(address, "POST", CHAT, json.dumps(given).encode())
    assert (status, answer["error"]["message"]) == (400, "the chat template's result is too long")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("[::1]:8000", 200),
        ("127.0.0.1:", 200),
        ("", 421),
        ("[::1]evil.example", 421),
        ("localhost:80@evil.example", 421),
        ("localhost.evil.example", 421),
    ],
)
def test_a_host_is_this_machine_as_a_whole(host: str, status: int, address: str) -> None:
    assert _answer(address, "GET", "/health", Host=host)[0] == status


@pytest.mark.parametrize(("version", "status"), [("1.0", 200), ("1.1", 400)])
def test_a_check_of_health_needs_no_host_before_http_1_1(
    version: str, status: int, address: str
) -> None:
    place = urlsplit(address)
    with closing(socket.create_connection((place.hostname, place.port), 60)) as client:
        client.sendall(f"GET /health HTTP/{version}\r\n\r\n".encode())
        assert client.makefile("rb").readline().split()[1] == str(status).encode()


def test_a_key_of_any_letters_is_sent_as_utf_8() -> None:
    app = _application(None, api_key="sécret ключ")
    sent = {
        key: (b"authorization", f"Bearer {key}".encode())
        for key in ("sécret ключ", "secret", "s\xc3\xa9cret")
    }
    found = {key: asyncio.run(_status(app, {}, header)) for key, header in sent.items()}
    assert found == {"sécret ключ": 415, "secret": 401, "s\xc3\xa9cret": 401}


def test_a_path_with_one_more_slash_is_another(address: str) -> None:
    status, answer = _answer(address, "POST", f"{CHAT}/", b"{}")
    assert (status, answer["error"]["message"]) == (404, "Not Found")


def test_formats_that_are_compiled_keep_no_other_request_waiting() -> None:
    """More of them than there are threads; the other request ends while all of them wait."""
    released = threading.Event()

    def build(fields: PromptFields) -> Prompt:
        if fields.grammar is not None:
            assert released.wait(60)
        raise RequestError("answered")

    app = _application(SimpleNamespace(build=build))

    async def all_of_them() -> list[int]:
        formatted = {"response_format": {"type": "json_object"}}
        waiting = [asyncio.ensure_future(_status(app, formatted)) for _ in range(50)]
        try:
            await asyncio.sleep(0.1)
            other = await asyncio.wait_for(_status(app, {}), 30)
        finally:
            released.set()
        return [other, *await asyncio.gather(*waiting)]

    assert asyncio.run(all_of_them()) == [400] * 51


def test_a_long_body_is_read_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some take seconds, in which streams go on."""
    threads: list[bool] = []

    def read(text: str, expected: str) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        raise RequestError("read")

    monkeypatch.setattr("quantkit.serve.app.parse_strict_object", read)
    app = _application(None)
    assert [asyncio.run(_status(app, {"user": "x" * size})) for size in (1, 1 << 17)] == [400, 400]
    assert threads == [True, False]


@pytest.mark.slow
def test_whoever_gets_no_whole_answer_before_the_server_ends_reads_why(model: Path) -> None:
    """After the grace time, here half a second."""
    program = (
        "import quantkit.cli.entry as cli, quantkit.serve.server as one; one._GRACE_SECONDS = 0.5;"
        " cli.main()"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "serve",
        str(model),
        "--port",
        "0",
        "--context",
        "4096",
    ]
    given = {"prompt": "War", "max_tokens": 4000, "n": 64, "logit_bias": {"2": -100}}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.findall(r"http://\S+(?=/v1)", process.stdout.readline())[0]
            with (
                ThreadPoolExecutor(1) as pool,
                closing(_connected(address, {**given, "stream": True})) as stream,
            ):
                whole = pool.submit(
                    _answer, address, "POST", "/v1/completions", json.dumps(given).encode()
                )
                response = stream.getresponse()
                response.readline()
                # On a busy machine the other request may not have reached the server yet.
                running = b""
                while b"quantkit_running_requests 2" not in running:
                    with urllib.request.urlopen(f"{address}/metrics") as metrics:
                        running = metrics.read()
                process.send_signal(signal.SIGTERM)
                *_, last, empty = response.read().split(b"\n\n")
                status, answer = whole.result()
            error = {
                "message": "the server is shutting down",
                "type": "server_error",
                "param": None,
                "code": None,
            }
            assert (json.loads(last.removeprefix(b"data: ")), empty) == ({"error": error}, b"")
            assert (status, answer) == (503, {"error": error})
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_what_takes_longer_than_the_time_limit_ends_with_an_error(model: Path) -> None:
    given = {"prompt": "War", "max_tokens": 4000, "logit_bias": {"2": -100}}
    with started(model, "--time-limit", "0.3", "--context", "4096") as (_, address):
        status, answer = _answer(address, "POST", "/v1/completions", json.dumps(given).encode())
        assert (status, answer["error"]["code"]) == (504, "timeout")
        with closing(_connected(address, {**given, "stream": True})) as stream:
            *_, last, empty = stream.getresponse().read().split(b"\n\n")
        assert (
            "more than 0.3 seconds" in json.loads(last.removeprefix(b"data: "))["error"]["message"]
        )
        assert empty == b""


def _connected(address: str, given: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(given).encode(), {"Content-Type": "application/json"}
    )
    return connection


def _application(builder: Any, api_key: str | None = None) -> Any:
    """The application, with prompts of this builder, and a worker without work."""
    worker = SimpleNamespace(
        alive=True, jobs=0, num_reused_tokens=0, num_proposed_tokens=0, num_accepted_tokens=0
    )
    served: Any = SimpleNamespace(
        name="demo",
        worker=worker,
        tokenizer=SimpleNamespace(special_tokens=None),
        builders={"/v1/completions": builder},
        grammars=None,
        max_body_bytes=1 << 20,
        max_body_seconds=60.0,
    )
    return application(served, api_key=api_key, hosts=None, max_requests=100)


async def _status(app: Any, given: dict[str, Any], header: tuple[bytes, bytes] = _JSON) -> int:
    """The status with which a completion is answered; with another header, without a type."""
    found: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"prompt": "x", **given}).encode()}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [header],
        "query_string": b"",
    }
    await app(scope, receive, send)
    return found[0]
