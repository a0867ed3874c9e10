"""Decide who may use a server: requests with its key, for a name of it, not too many at once."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from quantkit.openai.errors import error_to_json
from quantkit.serve import without_port
from quantkit.serve.connection import MAKE_ROOM, MakeRoom

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

RETRY = {"Retry-After": "1"}
"""The header of an answer to one request of too many; in seconds."""


class Guard:
    """An ASGI application that passes allowed requests on to another one."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        api_key: str | None,
        hosts: frozenset[str] | None,
        *,
        max_requests: int,
        open_paths: frozenset[str],
    ) -> None:
        """
        Args:
            api_key: that the header Authorization must have; None allows all requests.
            hosts: the names that the header Host may have: a page of another site whose name
                resolves to this machine has another one. None for any. A request of HTTP/1.0 may
                have no such header.
            max_requests: at the same time; more would take too much memory, even before they are
                read. If there is one more, a request whose client is slow to send it is dropped.
            open_paths: that need no key, are answered however many requests run, and are not
                counted.
        """
        self._app = app
        self._hosts = hosts
        self._open = open_paths
        self._max_requests = max_requests
        self._running = 0
        if api_key is None:
            self._expected = None
        else:
            self._expected = api_key.strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = None
        is_open = scope["path"] in self._open
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that uses the other header than this server would see another request after
            # this one.
            error = error_to_json("the request has both Content-Length and Transfer-Encoding")
            refusal = JSONResponse(error, 400, {"Connection": "close"})
        elif not self._has_known_host(headers):
            error = error_to_json(
                "this server is not known by that name; whoever runs it can allow it"
            )
            refusal = JSONResponse(error, 421)
        elif not is_open and not self._has_key(headers):
            error = error_to_json("the API key is missing or wrong", code="invalid_api_key")
            refusal = JSONResponse(error, 401, {"WWW-Authenticate": "Bearer"})
        is_full = self._running >= self._max_requests
        # Refused requests must not make another one give way.
        if refusal is None and not is_open and is_full and not _make_room(scope):
            error = error_to_json(
                "too many requests at once; try again",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
            # The server does not wait for the body, so the connection cannot be used again.
            refusal = JSONResponse(error, 503, {**RETRY, "Connection": "close"})
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        # Requests of open paths have no body, so they take no memory that others need.
        if is_open:
            await self._app(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1

    def _has_known_host(self, headers: Headers) -> bool:
        """Tell whether a request calls this server by an allowed name.

        HTTP/1.0 has no such header, and neither have the checks of load balancers that use it. Each
        browser sends the header, so no page of another site gets here without one.
        """
        if self._hosts is None or "host" not in headers:
            return True
        return without_port(headers["host"]) in self._hosts

    def _has_key(self, headers: Headers) -> bool:
        """Compare the key of a request with the expected one."""
        if self._expected is None:
            return True
        # In constant time, so that response times tell nothing about the key.
        return hmac.compare_digest(_bearer_token(headers), self._expected)


def _make_room(scope: Scope) -> bool:
    """Drop the request of another client that sends it slowly, and return whether there is one."""
    # Only `Connection` provides this function; another ASGI server does not.
    make_room: MakeRoom | None = scope.get("state", {}).get(MAKE_ROOM)
    return make_room is not None and make_room()


def _bearer_token(headers: Headers) -> bytes:
    """Extract the key of a request; empty if there is none."""
    # starlette decodes headers as Latin-1; this gives the bytes that were sent.
    authorization = headers.get("authorization", "").encode("latin-1")
    scheme, _, token = authorization.partition(b" ")
    # The name of the scheme may have any case.
    if scheme.lower() == b"bearer":
        return token.strip()
    return b""
