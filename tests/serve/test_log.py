"""The log of requests: one line of JSON for each, with the id that its response has, and without
what it says.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import OpenAI
from served import KEY, started

from quantkit.runtime.request import Delta, Request
from quantkit.serve.log import RequestLog, record_answer

ENDLESS: dict[str, Any] = {
    "model": "demo",
    "prompt": "A secret war",
    "max_tokens": 400,
    "n": 64,
    "logit_bias": {"2": -100},
}


@pytest.fixture(scope="module")
def logged(
    model: Path, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """The address of a server with a key, and its log."""
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    log.write_text('{"request_id": "earlier"}\n')
    options = [
        "--template",
        template,
        "--slots",
        "1",
        "--waiting",
        "0",
        "--name",
        "demo",
        "--context",
        "512",
    ]
    with started(model, *options, "--api-key", KEY, "--log", log) as (_, address):
        yield address, log
    assert log.read_text().startswith('{"request_id": "earlier"}\n')
    assert KEY not in log.read_text()
    assert "secret" not in log.read_text()


def _entry(log: Path, number: str) -> dict[str, Any]:
    """The line of a request, once it is there."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [
            one
            for one in map(json.loads, log.read_text().splitlines())
            if one["request_id"] == number
        ]
        if found:
            assert len(found) == 1
            return dict(found[0])
        time.sleep(0.02)
    raise AssertionError(f"no line of {number}")


def _get(address: str, path: str, **headers: str) -> tuple[int, str]:
    """Status of a response, and its request id."""
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}", **headers})
        response = connection.getresponse()
        found = response.headers.get_all("X-Request-Id")
        assert found is not None
        assert len(found) == 1
        return response.status, found[0]


@pytest.mark.slow
def test_a_line_says_how_a_request_went(logged: tuple[str, Path]) -> None:
    address, log = logged
    client = OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    before = time.time()
    messages: Any = [{"role": "user", "content": "Who knows a secret?"}]
    answer = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=6, n=2, temperature=1, logit_bias={"2": -100}
    )
    assert answer._request_id is not None
    assert re.fullmatch("req-[0-9a-f]{24}", answer._request_id)
    assert answer.usage is not None
    entry = _entry(log, answer._request_id)
    assert list(entry) == [
        "time",
        "request_id",
        "client",
        "method",
        "path",
        "status",
        "seconds",
        "first_token_seconds",
        "prompt_tokens",
        "completion_tokens",
        "finish_reasons",
    ]
    assert (entry["client"], entry["method"], entry["path"]) == (
        "127.0.0.1",
        "POST",
        "/v1/chat/completions",
    )
    assert (entry["status"], entry["finish_reasons"]) == (200, ["length", "length"])
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (answer.usage.prompt_tokens, 12)
    assert 0 < entry["first_token_seconds"] <= entry["seconds"] < time.time() - before
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entry["time"])


def test_an_id_of_the_client_is_kept_if_it_is_short_and_plain(logged: tuple[str, Path]) -> None:
    address, log = logged
    for number in ("mine-1", "a" * 64, "A_b.c"):
        assert _get(address, "/health", **{"X-Request-Id": number}) == (200, number)
        entry = _entry(log, number)
        assert (entry["path"], entry["status"]) == ("/health", 200)
        assert "prompt_tokens" not in entry
    for number in ("", "a" * 65, "two words", 'x"y', "a\tb", "é", "<b>"):
        assert _get(address, "/health", **{"X-Request-Id": number})[1].startswith("req-")


def test_errors_have_an_id_and_a_line(logged: tuple[str, Path]) -> None:
    address, log = logged
    for path, status, headers in (
        ("/v1/models", 401, {"Authorization": "Bearer wrong"}),
        ("/v1/models", 421, {"Host": "evil.example"}),
        ("/nothing", 404, {}),
        ("/v1/completions", 405, {}),
        ("/v1/models/x", 404, {}),
    ):
        found, number = _get(address, path, **headers)
        assert (found, _entry(log, number)["status"]) == (status, status)


def test_nothing_that_a_client_sends_makes_another_line(logged: tuple[str, Path]) -> None:
    address, log = logged
    path = "/x%0A%7B%22request_id%22:1%7D%1B[2J%E2%80%A8" + "y" * 1000 + "?key=secret"
    status, number = _get(address, path)
    assert status == 404
    entry = _entry(log, number)
    assert entry["path"].startswith('/x\n{"request_id":1}\x1b[2J\u2028yyy')
    assert len(entry["path"]) == 256
    line = next(one for one in log.read_bytes().split(b"\n") if number.encode() in one)
    assert all(32 <= byte < 127 for byte in line)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_logged_as_such(stream: bool, logged: tuple[str, Path]) -> None:
    address, log = logged
    place = urlsplit(address)
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    number = f"gone-{stream}"
    with socket.create_connection((place.hostname, place.port), timeout=60) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        )
        client.sendall(f"{head}X-Request-Id: {number}\r\nContent-Length: {len(body)}\r\n".encode())
        client.sendall(b"Content-Type: application/json\r\n\r\n" + body)
        if stream:
            assert b"200 OK" in client.recv(1 << 16)
        else:
            time.sleep(0.3)
    entry = _entry(log, number)
    assert (entry["status"], entry["finish_reasons"][-1], len(entry["finish_reasons"])) == (
        499,
        None,
        64,
    )
    assert entry["prompt_tokens"] > 0
    assert entry["completion_tokens"] < 64 * 400


def test_too_many_requests_at_once_are_refused_in_json(logged: tuple[str, Path]) -> None:
    """Before their bodies have come: one slot, none that wait, and some more."""
    address, _ = logged
    place = urlsplit(address)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Authorization: Bearer {KEY}\r\n".encode()
    head += b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    clients = [
        socket.create_connection((place.hostname, place.port), timeout=60) for _ in range(18)
    ]
    try:
        for client in clients:
            client.sendall(head)
        deadline = time.monotonic() + 30
        while (status := _get(address, "/v1/models")[0]) != 503:  # until all of them have been read
            assert status == 200
            assert time.monotonic() < deadline
        with closing(http.client.HTTPConnection(place.netloc, timeout=60)) as connection:
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
            response = connection.getresponse()
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert json.loads(response.read())["error"]["code"] == "rate_limit_exceeded"
        assert _get(address, "/health")[0] == 200
        assert _get(address, "/v1/models", Authorization="")[0] == 401
    finally:
        for client in clients:
            client.close()
    deadline = time.monotonic() + 30
    while _get(address, "/v1/models")[0] != 200:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("error", [None, ValueError("broken")])
def test_an_answer_that_the_server_cannot_finish_is_logged_as_its_error(
    error: Exception | None,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        added = record_answer(scope, [Request([1, 2], 4)], {"prompt": "x"}, lambda delta: None)
        await send({"type": "http.response.start", "status": 200})
        added(Delta(0, "a", [5]))
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if error is not None:
            raise error
        await send({"type": "http.response.body", "body": b"failed"})

    async def send(message: Any) -> None:
        pass

    lines: list[Any] = []
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with nullcontext() if error is None else pytest.raises(ValueError, match="broken"):
        asyncio.run(RequestLog(app, lines.append)(scope, send, send))  # type: ignore[arg-type]
    (line,) = lines
    assert (line["status"], line["finish_reasons"], line["completion_tokens"]) == (500, [None], 1)


@pytest.mark.slow
def test_prompts_are_logged_where_that_is_requested(
    model: Path, template: Path, tmp_path: Path
) -> None:
    log = tmp_path / "new.jsonl"
    with started(model, "--template", template, "--log", log, "--log-prompts") as (_, address):
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        text = client.completions.create(model=model.name, prompt="My fellow\n", max_tokens=2)
        messages: Any = [{"role": "user", "content": "Who?"}]
        chat = client.chat.completions.create(model=model.name, messages=messages, max_tokens=2)
        assert _entry(log, str(text._request_id))["prompt"] == "My fellow\n"
        assert _entry(log, str(chat._request_id))["prompt"] == messages
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.slow
def test_a_log_on_stdout_has_it_to_itself(model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "quantkit.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--log",
        "-",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        while (
            found := re.search(
                r"at (http://\S+)/v1; Ctrl-C ends it", line := process.stderr.readline()
            )
        ) is None:
            assert line
        _, number = _get(found[1], "/health")
        assert json.loads(process.stdout.readline())["request_id"] == number
        process.stdout.close()  # and the server goes on
        assert [_get(found[1], "/health")[0] for _ in range(2)] == [200, 200]
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr.read().count("the log of requests cannot be written") == 1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--log-prompts"], 2, "--log-prompts requires --log"),
        (["--log", os.curdir], 5, "the log cannot be written: Is a directory"),
        (["--log", "/none/x"], 5, "/none/x: the log cannot be written: No such file or directory"),
    ],
)
def test_a_log_that_cannot_be_is_refused(
    options: list[str], code: int, message: str, model: Path
) -> None:
    command = [sys.executable, "-m", "quantkit.cli", "serve", str(model), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert message in done.stderr
