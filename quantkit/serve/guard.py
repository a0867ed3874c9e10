"""Who may use a server: requests with its key, for a name of it, and not too many at once."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from quantkit.serve import without_port
from quantkit.serve.answers import error_of
from quantkit.serve.connection import MAKE_ROOM, MakeRoom

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

RETRY = {"Retry-After": "1"}
"""The header of an answer to one request of too many; in seconds."""


class Guard:
    """An ASGI application that passes on what is allowed."""

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
            api_key: that the header Authorization must have; None lets all in.
            hosts: the names that the header Host may have: a page of another site, whose name leads
                here, has its own. None for any. A request of HTTP/1.0 may have no such header.
            max_requests: at the same time; more would take too much memory, even before they are
                read. For one more, a request gives way whose client is slow to send it.
            open_paths: that need no key, and are answered however many requests run.
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
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that believes the other header than this server sees another request after
            # this one.
            wrong = error_of("the request has both Content-Length and Transfer-Encoding")
            refusal = JSONResponse(wrong, 400, {"Connection": "close"})
        elif not self._has_known_host(headers):
            unknown = error_of(
                "this server is not known by that name; whoever runs it can allow it"
            )
            refusal = JSONResponse(unknown, 421)
        elif scope["path"] not in self._open and not self._has_key(headers):
            wrong = error_of("the API key is missing or wrong", code="invalid_api_key")
            refusal = JSONResponse(wrong, 401, {"WWW-Authenticate": "Bearer"})
        is_counted = scope["path"] not in self._open
        if (
            refusal is None
            and is_counted
            and self._running >= self._max_requests
            and not _make_room(scope)
        ):
            busy = error_of(
                "too many requests at once; try again",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
            # The body is not waited for.
            refusal = JSONResponse(busy, 503, {**RETRY, "Connection": "close"})
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1

    def _has_known_host(self, headers: Headers) -> bool:
        """Return whether a request calls this server by a name that it may have.

        HTTP/1.0 has no such header, and neither have the checks that load balancers send with it.
        Each browser sends it, so that no page of another site gets here without one.
        """
        if self._hosts is None or "host" not in headers:
            return True
        return without_port(headers["host"]) in self._hosts

    def _has_key(self, headers: Headers) -> bool:
        return self._expected is None or hmac.compare_digest(_bearer_token(headers), self._expected)


def _make_room(scope: Scope) -> bool:
    """Give up the request of another client that is slow to send it, and return whether there is
    one.
    """
    make_room: MakeRoom | None = scope.get("state", {}).get(MAKE_ROOM)
    return make_room is not None and make_room()


def _bearer_token(headers: Headers) -> bytes:
    """Return the key that a request has; empty if there is none.

    The name of the scheme may have any case.
    """
    # The bytes that were sent.
    authorization = headers.get("authorization", "").encode("latin-1")
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return b""
