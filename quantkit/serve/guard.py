"""Who may use a server: requests with its key, for a name of it, and not too many at once."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from quantkit.serve.answers import error_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]*)(?::\d*)?", re.ASCII)

RETRY = {"Retry-After": "1"}
"""The header of an answer to one request of too many; in seconds."""


class Guard:
    """An ASGI application that passes on what is allowed."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], api_key: str | None,
        hosts: frozenset[str] | None, *, max_requests: int, open_paths: frozenset[str],
    ) -> None:  # fmt: skip
        """
        Args:
            api_key: that the header Authorization must have; None lets all in.
            hosts: the names that the header Host may have: a page of another site, whose name leads here, has its
                own. None for any.
            max_requests: at the same time; more would take too much memory, even before they are read.
            open_paths: that need no key, and are answered however many requests run.
        """
        self._app, self._hosts, self._open = app, hosts, open_paths
        self._max_requests, self._running = max_requests, 0
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, refusal = Headers(scope=scope), None
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            refusal = JSONResponse(error_of("this server is not known by that name"), 421)
        elif self._expected is not None and scope["path"] not in self._open:
            given = headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
            if not hmac.compare_digest(given, self._expected):
                wrong = error_of("the API key is missing or wrong", code="invalid_api_key")
                refusal = JSONResponse(wrong, 401, {"WWW-Authenticate": "Bearer"})
        if refusal is None and self._running >= self._max_requests and scope["path"] not in self._open:
            busy = error_of("too many requests at once; try again", kind="rate_limit_error", code="rate_limit_exceeded")
            refusal = JSONResponse(busy, 503, {**RETRY, "Connection": "close"})  # the body is not waited for
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1


def _name(host: str) -> str | None:
    """A host without its port, in small letters; None if it is none."""
    found = _HOST.fullmatch(host.lower())
    return None if found is None else found[1]
