"""Request ids, and the log of requests: a JSON line for each one that has ended."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from quantkit.runtime.request import Delta, Request
from quantkit.serve.connection import DELIVERED, Delivered
from quantkit.serve.guard import Receive, Scope, Send

HEADER = "x-request-id"
CLIENT_GONE = 499
"""The status that is logged where the client went away before its answer ended, as in nginx."""

# Ids of clients are copied to a header and to the log, so they contain nothing that needs escapes.
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# The key of the record in the scope of a request.
_KEY = "quantkit.record"
# Characters of a path in the log: clients can request paths of any length.
_MAX_PATH = 256


@dataclass
class _Record:
    """The facts about a request that its line of the log needs."""

    id: str
    arrived: datetime = field(default_factory=lambda: datetime.now(UTC))
    begun: float = field(default_factory=time.perf_counter)
    status: int | None = None
    is_complete: bool = False
    requests: Sequence[Request] = ()
    prompt: object = None
    num_tokens: int = 0
    # By the numbers of the prompt and the sample.
    finish_reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    first_token_seconds: float | None = None

    def line(self, scope: Scope, *, prompts: bool) -> dict[str, Any]:
        """Build the line of the log, without the request's content unless `prompts`."""
        seconds = time.perf_counter() - self.begun
        values = {
            "time": self.arrived.isoformat(timespec="milliseconds"),
            "request_id": self.id,
            "client": (scope.get("client") or (None,))[0],
            "method": scope["method"],
            # Without the query, which could contain a key.
            "path": scope["path"][:_MAX_PATH],
            "status": self._status(),
            "seconds": round(seconds, 4),
        }
        if self.requests:
            first = self.first_token_seconds
            # None for an answer that was cut off.
            reasons = [self.finish_reasons.get(numbers) for numbers in self._continuations()]
            values |= {
                "first_token_seconds": None if first is None else round(first, 4),
                "prompt_tokens": sum(len(request.prompt) for request in self.requests),
                "completion_tokens": self.num_tokens,
                "finish_reasons": reasons,
            }
            if prompts:
                values["prompt"] = self.prompt
        return values

    def _status(self) -> int:
        """Choose the status to log."""
        if self.status is None or not self.is_complete:
            return CLIENT_GONE
        is_unfinished = len(self.finish_reasons) < len(self._continuations())
        # A stream begins with status 200, even if an error ends it.
        if self.status == 200 and is_unfinished:
            return 500
        return self.status

    def _continuations(self) -> list[tuple[int, int]]:
        """List the numbers of the prompt and of the sample of each continuation."""
        continuations: list[tuple[int, int]] = []
        for number, request in enumerate(self.requests):
            for sample in range(request.samples):
                continuations.append((number, sample))
        return continuations


class RequestLog:
    """An ASGI application that gives each response of another one the request's id, in the header
    X-Request-Id, and logs the request once it has ended.

    A client's own id is used if it consists of at most 64 letters, digits, dots, hyphens and
    underscores.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        log: Callable[[Mapping[str, Any]], None] | None,
        *,
        prompts: bool = False,
    ) -> None:
        """
        Args:
            log: called with the line of each request; None logs nothing.
            prompts: also log the messages or prompts of requests.
        """
        self._app = app
        self._log = log
        self._prompts = prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(HEADER, "")
        if not _CLIENT_ID.fullmatch(request_id):
            request_id = f"req-{secrets.token_hex(12)}"
        record = _Record(request_id)
        scope[_KEY] = record

        async def send_and_record(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), (HEADER.encode(), record.id.encode())]
                message = {**message, "headers": headers}
            await send(message)
            # Complete only after the last part was written without an error.
            if message["type"] == "http.response.body" and not message.get("more_body"):
                record.is_complete = True

        try:
            await self._app(scope, receive, send_and_record)
        except Exception as error:
            # Any other error is the server's; uvicorn then answers with 500.
            if not isinstance(error, ClientDisconnect | OSError):
                record.status = 500
                record.is_complete = True
            raise
        finally:
            if self._log is not None:
                await self._check_delivery(scope, record)
                self._log(record.line(scope, prompts=self._prompts))

    async def _check_delivery(self, scope: Scope, record: _Record) -> None:
        """Wait until the client has read a complete response, and record if it has not."""
        delivered: Delivered | None = scope.get("state", {}).get(DELIVERED)
        if record.is_complete and delivered is not None:
            record.is_complete = await delivered()


def record_answer(
    scope: Scope,
    requests: Sequence[Request],
    body: Mapping[str, Any],
    count_delta: Callable[[Delta], None],
) -> Callable[[Delta], None]:
    """Record for the log what becomes of a request.

    Args:
        scope: of the HTTP request, below a `RequestLog`.
        body: the request's JSON.
        count_delta: also called with each step's part of the answer.

    Returns:
        A function to call with each step's part of the answer.
    """
    record: _Record = scope[_KEY]
    record.requests = requests
    record.prompt = body.get("messages", body.get("prompt"))

    def record_delta(delta: Delta) -> None:
        count_delta(delta)
        record.num_tokens += len(delta.token_ids)
        if delta.token_ids and record.first_token_seconds is None:
            record.first_token_seconds = time.perf_counter() - record.begun
        if delta.completion is not None:
            record.finish_reasons[delta.prompt, delta.sample] = delta.completion.finish_reason

    return record_delta
