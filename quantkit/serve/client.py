"""A client of servers with OpenAI's API: of `quantkit serve`, and of others. It needs the standard
library alone, and follows no redirects, which could lead the API key to another host.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError, UnreachableError
from quantkit.serve import is_loopback
from quantkit.serve.client_errors import (
    create_lost_error,
    create_other_api_error,
    create_refusal_error,
    create_unreachable_error,
    server_message,
)

_CONNECT_SECONDS = 10.0
# A request may wait for others, and a long prompt takes its time.
_SILENT_SECONDS = 600.0
_POLL_SECONDS = 0.05
# Limits of what is kept in memory, whatever the server sends.
_LINE_BYTES = 1 << 20
_BODY_BYTES = 4 << 20
# Marks the end of the values in a queue, in which None is a value.
_END = object()

_Opened = Callable[[socket.socket], None]


class Server:
    """A server with OpenAI's API.

    Attributes:
        url: its address, which the paths of requests are appended to.
        exposes_key: whether the key is sent over a network without encryption.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Check the address and the key; nothing is sent.

        Args:
            url: such as ``http://127.0.0.1:8000/v1``; if it has no path, ``/v1`` is appended.
            api_key: sent with each request, to this address only.

        Raises:
            RequestError: if `url` is no address, or the key cannot be sent.
        """
        # Control characters or spaces could end the request line; other parts are no address.
        is_plain = url.isascii() and url.isprintable() and not set(" ?#\\") & set(url)
        # The property `port` raises for a number that is out of range.
        try:
            parts = urlsplit(url if is_plain else "")
            port = parts.port
        except ValueError:
            parts = urlsplit("")
            port = None
        # The address is not shown in this error, as it may contain a password.
        if "@" in url:
            raise RequestError(
                Message(Option("url"), " contains a user name"),
                hint=Message("remove it, and use ", Option("api_key")),
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            expected = "an address such as http://127.0.0.1:8000/v1"
            raise RequestError(
                Message(Option("url"), " is not valid"), found=format_value(url), expected=expected
            )
        if api_key is not None:
            # A header can contain nothing else; a line break could add another header.
            is_sendable = api_key.strip() and api_key.isascii() and api_key.isprintable()
            if not is_sendable:
                raise RequestError(
                    Message(Option("api_key"), " cannot be sent"),
                    expected="printable ASCII characters",
                )
        self._path = parts.path.rstrip("/") or "/v1"
        self._key = api_key
        self._encrypted = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.exposes_key = (
            api_key is not None and not self._encrypted and not is_loopback(parts.hostname)
        )

    def models(self) -> list[str]:
        """Request the names of the server's models.

        Raises:
            RequestError: if the server refuses the request, or answers with something else.
            UnreachableError: if it cannot be reached, or fails.
        """
        answer: Any = None
        # None arrives while the client waits.
        for value in self._read("GET", "/models", None):
            if value is not None:
                answer = value
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list):
            raise create_other_api_error(self.url, answer)
        names: list[str] = []
        for model in models:
            name = model.get("id") if isinstance(model, dict) else None
            if not isinstance(name, str):
                raise create_other_api_error(self.url, answer)
            names.append(name)
        if not names:
            raise create_other_api_error(self.url, answer)
        return names

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any, None, None]:
        """Request an answer in pieces. Closing the generator closes the connection, and so ends the
        server's work.

        Yields:
            JSON values as they arrive, and None whenever nothing has come for a moment.

        Raises:
            ContextLengthError: if the request is too long for the model's context.
            RequestError: if the server refuses it, or answers with something else.
            UnreachableError: if the server cannot be reached, has no room or fails, or the
                connection is lost.
        """
        return self._read("POST", path, json.dumps(body).encode())

    def _read(self, method: str, path: str, body: bytes | None) -> Generator[Any, None, None]:
        """Send a request, and yield the JSON values of its answer, with None while it waits."""
        return _in_thread(lambda opened: self._values(opened, method, path, body))

    def _values(self, opened: _Opened, method: str, path: str, body: bytes | None) -> Iterator[Any]:
        """Send a request, and yield the JSON values of its answer; blocks until they arrive.

        `opened` is called with the connection's socket.
        """
        kind = http.client.HTTPSConnection if self._encrypted else http.client.HTTPConnection
        with closing(kind(self._host, self._port, timeout=_CONNECT_SECONDS)) as connection:
            try:
                connection.connect()
            except (OSError, UnicodeError) as error:
                raise create_unreachable_error(self.url, error) from error
            # The time limit above is for connecting only.
            connection.sock.settimeout(_SILENT_SECONDS)
            opened(connection.sock)
            headers = {"Accept": "application/json, text/event-stream", "Connection": "close"}
            if body is not None:
                headers["Content-Type"] = "application/json"
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            try:
                connection.request(method, self._path + path, body, headers)
                with closing(connection.getresponse()) as response:
                    if response.status != 200:
                        raise create_refusal_error(
                            self.url, response, with_key=self._key is not None
                        )
                    if body is None:
                        yield self._parse_json(response.read(_BODY_BYTES))
                    else:
                        yield from self._events(response)
            except (OSError, http.client.HTTPException) as error:
                raise create_lost_error(self.url, error) from error

    def _events(self, response: HTTPResponse) -> Iterator[Any]:
        """Yield the data of server-sent events, up to ``[DONE]`` or the end of the response."""
        content_type = response.headers.get_content_type()
        if content_type != "text/event-stream":
            raise create_other_api_error(self.url, f"{content_type}, not an event stream")
        while line := response.readline(_LINE_BYTES):
            name, _, value = line.rstrip(b"\r\n").partition(b":")
            if name != b"data":
                # The end of an event, a comment, or a field that this API does not use.
                continue
            # `readline` stops at a line end, at the end of the response, or at the limit.
            if not line.endswith(b"\n"):
                if len(line) < _LINE_BYTES:
                    raise create_lost_error(self.url)
                raise create_other_api_error(self.url, "an unterminated line")
            if value.strip() == b"[DONE]":
                return
            event = self._parse_json(value)
            # After the status 200, an error arrives as an event.
            if isinstance(event, dict) and event.get("error") is not None:
                message = server_message(value)[0] or "the server has failed"
                raise UnreachableError(f"{self.url} could not finish the answer: {message}")
            yield event

    def _parse_json(self, content: bytes) -> Any:
        """Parse a JSON value; raises `RequestError` if it is not JSON."""
        try:
            return json.loads(content.decode())
        except (ValueError, RecursionError):
            raise create_other_api_error(self.url, content) from None


def _in_thread(values: Callable[[_Opened], Iterator[Any]]) -> Generator[Any, None, None]:
    """Yield values that another thread reads from a connection, and None while none arrives.

    So the caller can stop at any time, also while the name of the host is looked up; the connection
    is then closed.
    """
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lock = threading.Lock()
    sockets: list[socket.socket] = []
    closed = threading.Event()

    def register_socket(connection: socket.socket) -> None:
        with lock:
            sockets.append(connection)
            # The caller may have stopped while the connection was opened.
            if closed.is_set():
                _shut_down(connection)

    def read() -> None:
        try:
            for value in values(register_socket):
                arrived.put(value)
            arrived.put(_END)
        # Raised in the caller's thread.
        except Exception as error:
            arrived.put(error)

    threading.Thread(target=read, name="quantkit-client", daemon=True).start()
    try:
        while True:
            try:
                value = arrived.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                yield None
                continue
            if value is _END:
                return
            if isinstance(value, Exception):
                raise value
            yield value
    finally:
        with lock:
            closed.set()
            for open_socket in sockets:
                _shut_down(open_socket)


def _shut_down(connection: socket.socket) -> None:
    """Shut a connection down; another thread that reads from it then reads its end."""
    # An error means that the connection has ended.
    with suppress(OSError):
        # The method of the base class sends no closing message of TLS, as that could wait for the
        # server.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
