"""Who may use a server: requests with its key, for a name of it."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from quantkit.serve.answers import error_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """An ASGI application that passes on what is allowed."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], api_key: str | None,
        hosts: frozenset[str] | None, *, open_paths: frozenset[str],
    ) -> None:  # fmt: skip
        """
        Args:
            api_key: that the header Authorization must have; None lets all in.
            hosts: the names that the header Host may have: a page of another site, whose name leads here, has its
                own. None for any.
            open_paths: that need no key.
        """
        self._app, self._hosts, self._open = app, hosts, open_paths
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, refusal = Headers(scope=scope), None
        if self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            refusal = JSONResponse(error_of("this server is not known by that name"), 421)
        elif self._expected is not None and scope["path"] not in self._open:
            given = headers.get("authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, self._expected):
                wrong = error_of("the API key is missing or wrong", code="invalid_api_key")
                refusal = JSONResponse(wrong, 401, {"WWW-Authenticate": "Bearer"})
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _name(host: str) -> str:
    """A host without its port."""
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
