"""Clients that send or read nothing: they lose their connections, and the others do not wait for
them.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import forked
import pytest
from served import KEY

from quantkit.errors import RequestError
from quantkit.serve.server import ServeOptions

PER_ADDRESS = 24
COMPLETIONS = "/v1/completions"
WITHOUT_END = {"2": -100}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def impatient_server(
    model: Path, *options: str | Path, max_body_seconds: float = 1.0
) -> Iterator[str]:
    """Start a server whose time limits for clients are short, and return its address."""
    program = (
        "import quantkit.cli.entry as cli, quantkit.serve.server as server;server._HEADER_SECONDS"
        f" = 1.0; server._WRITE_SECONDS = 1.0;server._BODY_SECONDS = {max_body_seconds};import"
        " quantkit.serve.connection as connection; connection._SLOWEST_READER = 1 << 30;"
        " cli.main()"
    )
    command = forked.command("-c", program, "serve", model, "--port", "0", *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield re.findall(r"http://\S+(?=/v1)", process.stdout.readline())[0]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def address(model: Path, log: Path) -> Iterator[str]:
    options = [
        "--connections",
        str(PER_ADDRESS),
        "--slots",
        "2",
        "--waiting",
        "2",
        "--context",
        "4096",
        "--log",
        log,
    ]
    with impatient_server(model, *options) as found:
        yield found


def connect(address: str, *, receive_bytes: int | None = None) -> socket.socket:
    """Open a connection, with a small buffer for what is received if its size is given."""
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(60)
    place = urlsplit(address)
    client.connect((place.hostname, place.port))
    return client


def request_bytes(body: Any, *, path: str = COMPLETIONS, **headers: str) -> bytes:
    """Return a request as it is sent."""
    content = json.dumps(body).encode()
    fields = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + content


def read_to_end(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def check_health(address: str) -> int:
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except ConnectionError:  # refused before the request was read
            return 0


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def log_entry(log: Path, number: str) -> dict[str, Any]:
    """Return the line of a request, once it is written."""

    def entries() -> list[dict[str, Any]]:
        return [
            entry
            for entry in map(json.loads, log.read_text().splitlines())
            if entry["request_id"] == number
        ]

    wait_until(lambda: bool(entries()))
    return entries()[0]


SILENT = {
    "nothing": (b"", b""),
    "half a header": (b"GET /health HTTP/1.1\r\nHost: loc", b""),
    "half a body": (request_bytes({"prompt": "x", "max_tokens": 1})[:-3], b"HTTP/1.1 408 "),
    "one request": (HEALTH, b"HTTP/1.1 200 "),
    "half a second header": (HEALTH + b"GET /health HTTP/1.1\r\nHost: loc", b"HTTP/1.1 200 "),
    "half an unread body": (
        HEALTH[:-2] + b"Content-Length: 1000\r\n\r\nx",
        b"HTTP/1.1 200 ",
    ),
}
"""What clients send before they are silent, and how the answer begins that they read."""


@pytest.mark.slow
def test_silent_clients_lose_their_connections(address: str) -> None:
    with ExitStack() as stack:
        clients = {}
        for name, (sent, _) in SILENT.items():
            clients[name] = stack.enter_context(connect(address))
            clients[name].sendall(sent)
        for name, client in clients.items():
            answer = read_to_end(client)
            expected = SILENT[name][1]
            assert answer.startswith(expected), name
            assert bool(answer) == bool(expected), name


@pytest.mark.slow
def test_a_header_byte_by_byte_is_not_waited_for(address: str) -> None:
    header = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 10_000
    with connect(address) as client:
        client.settimeout(0.05)
        for number in range(len(header)):
            try:
                client.sendall(header[number : number + 1])
                assert client.recv(1) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the server read all of it")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stops_reading_gives_its_place_back(
    stream: bool, address: str, log: Path
) -> None:
    """The server takes four requests at a time; the answers are larger than what the sockets can
    hold.
    """
    body = {"prompt": [5] * 2000, "max_tokens": 4, "echo": True, "logprobs": 100, "stream": stream}
    with ExitStack() as stack:
        for number in range(4):
            client = stack.enter_context(connect(address, receive_bytes=4096))
            client.sendall(request_bytes(body, X_Request_Id=f"stopped-{stream}-{number}"))
        for number in range(4):
            assert log_entry(log, f"stopped-{stream}-{number}")["status"] == 499
        with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as other:
            other.request(
                "POST",
                COMPLETIONS,
                json.dumps({"prompt": "x", "max_tokens": 1}),
                {"Content-Type": "application/json"},
            )
            assert other.getresponse().status == 200


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_all_of_its_answer(address: str, log: Path) -> None:
    body = {
        "prompt": "War",
        "max_tokens": 100,
        "logprobs": 100,
        "logit_bias": WITHOUT_END,
        "stream": True,
    }
    with connect(address, receive_bytes=4096) as client:
        client.sendall(request_bytes(body, X_Request_Id="slow", Connection="close"))
        parts = []
        while part := client.recv(1 << 13):
            parts.append(part)
            time.sleep(0.02)
    assert b"data: [DONE]" in b"".join(parts)
    assert log_entry(log, "slow")["status"] == 200


def test_silent_clients_keep_no_one_out(address: str) -> None:
    """More of them than an address may have connections: those that were silent the longest give
    way.
    """
    with ExitStack() as stack:
        clients = []
        for number in range(3 * PER_ADDRESS):
            client = stack.enter_context(connect(address))
            kinds = [b"", b"GET /health HTTP/1.1\r\nHost: loc", request_bytes({"prompt": "x"})[:-3]]
            client.sendall(kinds[number % 3])
            clients.append(client)
        assert check_health(address) == 200
        clients[0].settimeout(20)
        assert read_to_end(clients[0]) == b""


@pytest.mark.slow
def test_requests_that_are_not_sent_whole_give_way(model: Path, tmp_path: Path) -> None:
    """There are more of them than the server takes at a time, which are 18 here."""
    log = tmp_path / "requests.jsonl"
    options = ["--slots", "1", "--waiting", "0", "--context", "64", "--log", log]
    with impatient_server(model, *options, max_body_seconds=600) as address, ExitStack() as stack:
        for number in range(30):
            client = stack.enter_context(connect(address))
            client.sendall(request_bytes({"prompt": "x"}, X_Request_Id=f"unsent-{number}")[:-3])

        def is_answered() -> bool:
            with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as other:
                other.request(
                    "POST", "/tokenize", b'{"prompt": "x"}', {"Content-Type": "application/json"}
                )
                return other.getresponse().status == 200

        wait_until(is_answered)
        assert log_entry(log, "unsent-0")["status"] == 499


@pytest.mark.slow
def test_an_address_with_too_many_busy_connections_is_refused(model: Path) -> None:
    body = {"prompt": "War", "max_tokens": 3000, "logit_bias": WITHOUT_END, "stream": True}
    with (
        impatient_server(model, "--connections", "2", "--context", "4096") as address,
        ExitStack() as stack,
    ):
        busy = [stack.enter_context(connect(address)) for _ in range(2)]
        for client in busy:
            client.sendall(request_bytes(body))
        for client in busy:
            assert client.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
        with connect(address) as another:
            answer = read_to_end(another)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert (
            json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "rate_limit_exceeded"
        )
        busy[0].close()
        wait_until(lambda: check_health(address) == 200)


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/nothing"])
def test_a_client_that_leaves_before_its_body_ends_is_logged_so(
    path: str, address: str, log: Path
) -> None:
    number = f"left{path.replace('/', '-')}"
    with connect(address) as client:
        client.sendall(request_bytes({"prompt": "x"}, path=path, X_Request_Id=number)[:-3])
        if path == "/nothing":
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
    assert log_entry(log, number)["status"] == (404 if path == "/nothing" else 499)


def test_two_lengths_of_a_body_are_refused(address: str) -> None:
    """Else a proxy that believes the other one sees two requests in one."""
    with connect(address) as client:
        sent = request_bytes({"prompt": "x"}, Transfer_Encoding="chunked")
        client.sendall(sent + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("coding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200), ("", 200)]
)
def test_compressed_bodies_are_refused(coding: str, status: int, address: str) -> None:
    with connect(address) as client:
        client.sendall(
            request_bytes(
                {"prompt": "x"}, path="/tokenize", Content_Encoding=coding, Connection="close"
            )
        )
        answer = read_to_end(client)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"accept-encoding: identity" in answer.lower()) is (status == 415)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (f"BEARER   {KEY}", 200),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        ("Bearer", 401),
        (f"Bearer {KEY.upper()}", 401),
        (f"Bearer{KEY}", 401),
    ],
)
def test_the_scheme_of_a_key_may_have_any_case(
    authorization: str, status: int, keyed: tuple[str, str]
) -> None:
    with closing(http.client.HTTPConnection(urlsplit(keyed[0]).netloc, timeout=60)) as connection:
        connection.request("GET", "/v1/models", headers={"Authorization": authorization})
        assert connection.getresponse().status == status


@pytest.mark.slow
def test_the_name_of_a_proxy_can_be_allowed(model: Path) -> None:
    with impatient_server(
        model, "--allowed-host", "LLM.example", "--allowed-host", "2001:db8::1"
    ) as address:
        for host, status in {
            "llm.example": 200,
            "llm.example:443": 200,
            "[2001:db8::1]:80": 200,
            "localhost": 200,
            "evil.example": 421,
            "x.llm.example": 421,
            "llm.example.evil": 421,
        }.items():
            with closing(
                http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
            ) as connection:
                connection.request("GET", "/health", headers={"Host": host})
                assert (host, connection.getresponse().status) == (host, status)


def test_hosts_are_any_for_other_machines_unless_some_are_named() -> None:
    assert ServeOptions(host="0.0.0.0", api_key=KEY).host_names is None
    named = ServeOptions(host="0.0.0.0", api_key=KEY, allowed_host=("llm.example",)).host_names
    assert named == {"llm.example", "localhost", "127.0.0.1", "[::1]"}


@pytest.mark.parametrize(
    ("host", "name"),
    [("127.0.0.2", "127.0.0.2"), ("0:0:0:0:0:0:0:1", "[0:0:0:0:0:0:0:1]"), ("::1", "[::1]")],
)
def test_a_server_answers_to_the_address_that_it_prints(host: str, name: str) -> None:
    assert ServeOptions(host=host).host_names == {name, "localhost", "127.0.0.1", "[::1]"}
    named = ServeOptions(host="192.0.2.7", api_key=KEY, allowed_host=("llm.example",)).host_names
    assert named == {"192.0.2.7", "llm.example", "localhost", "127.0.0.1", "[::1]"}


@pytest.mark.parametrize("host", ["", "https://llm.example", "llm.example:443", "a b", "*", "x/y"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(RequestError) as refused:
        ServeOptions(allowed_host=(host,))
    assert refused.value.argument == "allowed_host"
