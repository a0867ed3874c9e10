"""Limit the connections of a server: no client keeps one open by sending or reading nothing, and
none has too many of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from quantkit.openai.errors import error_to_json

DELIVERED = "quantkit.delivered"
"""In the state of a request's scope: a function that waits until the client has taken the whole
response, and returns whether it has.
"""

Delivered = Callable[[], Awaitable[bool]]

MAKE_ROOM = "quantkit.make_room"
"""In the state of a request's scope: a function that gives up another request, whose client is slow
to send it, and returns whether there is one.
"""

MakeRoom = Callable[[], bool]

# Between two checks of all connections.
_CHECK_SECONDS = 1.0
# Time for the body of a request, before the request can be dropped in favor of another one.
_SLOW_SENDER_SECONDS = 1.0
# Bytes per second; a large response may take that time in addition to `write_seconds`.
_SLOWEST_READER = 1 << 16


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of a client.

    Attributes:
        per_address: open connections of one address.
        header_seconds: for a whole header, after the connection was opened or the last response was
            sent.
        write_seconds: for reading what was written, and more for a large response.
    """

    per_address: int
    header_seconds: float
    write_seconds: float


class Connections:
    """The open connections of a server, by the addresses of their clients."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._of_address: dict[str, set[Connection]] = {}
        # Short limits need checks that are more frequent.
        self._check_seconds = min(
            _CHECK_SECONDS, limits.header_seconds / 4, limits.write_seconds / 4
        )
        self._next_check: asyncio.TimerHandle | None = None

    def admit(self, connection: Connection) -> bool:
        """Add a new connection, and return whether its address may have one more.

        If it has too many, the connection whose client has been silent the longest is closed. So
        silent clients keep no other one out, even if all of them come through one proxy.
        """
        siblings = self._of_address.setdefault(connection.address, set())
        if len(siblings) >= self.limits.per_address:
            silent = [sibling for sibling in siblings if sibling.waits_for_client]
            if not silent:
                return False
            longest_silent = min(silent, key=lambda sibling: sibling.last_active)
            self.remove(longest_silent)
            longest_silent.drop()
            # `remove` has deleted the set if it became empty.
            siblings = self._of_address.setdefault(connection.address, set())
        siblings.add(connection)
        if self._next_check is None:
            self._next_check = connection.loop.call_later(self._check_seconds, self._check)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        siblings = self._of_address.get(connection.address, set())
        siblings.discard(connection)
        if not siblings:
            self._of_address.pop(connection.address, None)

    def drop_slowest_sender(self) -> bool:
        """Close the connection that has waited the longest for the body of a request, and return
        whether there is one.

        Its age counts, and not how long its client has been silent: a client could send a byte at a
        time.
        """
        slowest: Connection | None = None
        for siblings in self._of_address.values():
            for connection in siblings:
                if not connection.is_slow_sender:
                    continue
                if slowest is None or connection.request_since < slowest.request_since:
                    slowest = connection
        if slowest is None:
            return False
        self.remove(slowest)
        slowest.drop()
        return True

    def _check(self) -> None:
        """Close the connections whose time is up."""
        self._next_check = None
        # A copy: dropping a connection changes the sets.
        connections: list[Connection] = []
        for siblings in self._of_address.values():
            connections += siblings
        for connection in connections:
            if connection.is_overdue:
                connection.drop()
        # Without connections no timer runs; `admit` starts it again.
        if connections:
            self._next_check = connections[0].loop.call_later(self._check_seconds, self._check)


class Connection(H11Protocol):
    """An HTTP connection that is closed if its client takes too long.

    uvicorn closes idle connections after a response only: it waits for ever for the first header,
    and for clients that stop reading.

    Attributes:
        address: of the client.
        last_active: when the client last sent something, or had read all that was written.
        request_since: when the header of the latest request was complete.
    """

    address: str
    last_active: float
    request_since: float

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open_connections = connections
        # None while the client has read all that was written.
        self._read_by: float | None = None
        self._is_cut_off = False
        self.app_state = {
            **self.app_state,
            DELIVERED: self._deliver,
            MAKE_ROOM: connections.drop_slowest_sender,
        }

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing pauses as soon as the client does not read, so that `flow.drain` waits for all
        # that was written.
        transport.set_write_buffer_limits(high=0)
        if self.client:
            self.address = self.client[0]
        else:
            self.address = ""
        self.last_active = self.request_since = self._idle_since = self.loop.time()
        if not self._open_connections.admit(self):
            transport.write(_TOO_MANY_CONNECTIONS)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        # None is an orderly end.
        self._is_cut_off |= exc is not None
        self._open_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.last_active = self.loop.time()
        # A connection that was refused still receives.
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        # uvicorn creates a cycle for each request once its header is complete.
        previous_cycle = self.cycle
        super().handle_events()
        if self.cycle is not previous_cycle:
            self.request_since = self.loop.time()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        seconds = self._open_connections.limits.write_seconds
        self._read_by = (
            self.loop.time() + seconds + self.transport.get_write_buffer_size() / _SLOWEST_READER
        )
        super().pause_writing()

    def resume_writing(self) -> None:
        self._read_by = None
        self.last_active = self.loop.time()
        super().resume_writing()

    @property
    def waits_for_client(self) -> bool:
        """Tell whether the server can do nothing until the client sends or reads something."""
        return self._is_between_requests or self.cycle.more_body or self._read_by is not None

    @property
    def is_slow_sender(self) -> bool:
        """Tell whether the body of a request has been incomplete for longer than others need."""
        if self._is_between_requests or not self.cycle.more_body:
            return False
        return self.loop.time() > self.request_since + _SLOW_SENDER_SECONDS

    @property
    def is_overdue(self) -> bool:
        """Tell whether the client has taken longer than it may."""
        now = self.loop.time()
        if self._read_by is not None:
            return now > self._read_by
        # Bodies have their own time limit, and answers may take as long as the model needs.
        if not self._is_between_requests:
            return False
        return now > self._idle_since + self._open_connections.limits.header_seconds

    def drop(self) -> None:
        """Close the connection now, also if the client has not read all of a response."""
        self._is_cut_off |= self._read_by is not None
        self.transport.abort()

    @property
    def _is_between_requests(self) -> bool:
        """Tell whether no header was read yet, or the last request was answered."""
        return self.cycle is None or self.cycle.response_complete

    async def _deliver(self) -> bool:
        """Wait until the client has taken all that was written, and return whether it has."""
        await self.flow.drain()
        return not (self._is_cut_off or self.cycle.disconnected)


def _refuse_connection() -> bytes:
    """Encode the response to a connection of an address that has too many."""
    # No request is read from such a connection, so uvicorn does not answer it.
    error = error_to_json(
        "too many connections from this address",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
    )
    body = json.dumps(error).encode()
    head = (
        "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


_TOO_MANY_CONNECTIONS = _refuse_connection()
