"""A server on this machine that answers as a test says, in the place of one with OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

MODELS = {"object": "list", "data": [{"id": "one", "object": "model"}]}


@dataclass
class Reply:
    """An answer; its parts are sent one by one, and the connection is closed after them."""

    status: int = 200
    parts: Iterable[bytes] = ()
    headers: Mapping[str, str] = field(
        default_factory=lambda: {"Content-Type": "text/event-stream"}
    )


@dataclass
class Api:
    """What a server got: paths with bodies and headers; and whether a client went away amid an
    answer.
    """

    url: str = ""
    requests: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    gone: Event = field(default_factory=Event)


def as_json(status: int, value: Any, headers: Mapping[str, str] = {}) -> Reply:
    """A JSON answer."""
    return Reply(
        status, [json.dumps(value).encode()], {"Content-Type": "application/json", **headers}
    )


def piece(text: str | None = None, *, finish: str | None = None) -> bytes:
    """An event of an answer to messages."""
    choice = {
        "index": 0,
        "delta": {} if text is None else {"content": text},
        "finish_reason": finish,
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def said(*texts: str, finish: str = "stop", usage: tuple[int, int] | None = None) -> Reply:
    """A whole answer, in pieces."""
    end = b"data: [DONE]\n\n"
    if usage is not None:
        counts = {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        }
        end = b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n" + end
    return Reply(parts=[*map(piece, texts), piece(finish=finish), end])


@contextmanager
def fake_api(answer: Callable[[Any], Reply], models: Reply | None = None) -> Iterator[Api]:
    """A server; `answer` is called with the body of each request for an answer to messages."""
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(None, models or as_json(200, MODELS))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(body, answer(body))

        def _send(self, body: Any, reply: Reply) -> None:
            api.requests.append(
                (self.path, body, {name.lower(): value for name, value in self.headers.items()})
            )
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for part in reply.parts:
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:
                api.gone.set()
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    api.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
