"""The application in this process: what it does when requests end in unusual ways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from quantkit.errors import QuantkitError, RequestError
from quantkit.serve import server
from quantkit.serve.app import Served, application
from quantkit.serve.guard import Guard
from quantkit.serve.server import ServeOptions, load_for_serving
from quantkit.serve.worker import Job, TimeLimitError, Worker

Message = MutableMapping[str, Any]


@pytest.fixture(scope="module")
def served(demo_model: Path) -> Iterator[Served]:
    served_model = load_for_serving(demo_model, ServeOptions(context=256, kept=0))
    yield served_model
    served_model.worker.stop()


@pytest.fixture
def app(served: Served) -> ASGIApp:
    return application(served, api_key=None, hosts=None, max_requests=4)  # type: ignore[no-any-return]


class _Call:
    """One request to an application, whose client disconnects after its body is read."""

    def __init__(self, path: str, body: dict[str, Any] | None = None, *, leaves: bool) -> None:
        self.messages: list[Message] = []
        self._leaves = leaves
        self._parts = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST" if body else "GET",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
        }

    async def run(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        async def receive() -> Message:
            if self._parts:
                return self._parts.pop()
            if not self._leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            # Other tasks run, as when a connection must first write what it has.
            await asyncio.sleep(0)
            self.messages.append(message)

        await app(self._scope, receive, send)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def test_a_stream_whose_client_leaves_before_it_begins_is_cancelled(
    served: Served, app: ASGIApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job | None] = []
    submit = Worker.submit

    def record_job(worker: Worker, *arguments: Any) -> Job | None:
        jobs.append(submit(worker, *arguments))
        return jobs[-1]

    monkeypatch.setattr(Worker, "submit", record_job)
    body = {"prompt": "The people", "max_tokens": 200, "stream": True}
    asyncio.run(_Call("/v1/completions", body, leaves=True).run(app))
    (job,) = jobs
    assert job is not None
    assert job.cancelled


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (TimeLimitError("too slow"), 504, "server_error", "timeout"),
        (RequestError("wrong"), 400, "invalid_request_error", None),
        (QuantkitError("broken"), 500, "server_error", None),
    ],
)
def test_an_error_is_the_same_with_and_without_a_stream(
    error: QuantkitError,
    status: int,
    kind: str,
    code: str | None,
    app: ASGIApp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(worker: Worker, requests: Any, stop: Any, deliver: Any) -> Job:
        deliver(error)
        return Job(requests, stop, deliver, ends_by=0)

    monkeypatch.setattr(Worker, "submit", fail)
    body = {"prompt": "The people", "max_tokens": 4}
    complete = _Call("/v1/completions", body, leaves=False)
    asyncio.run(complete.run(app))
    assert complete.status == status
    expected = json.loads(complete.content)
    assert (expected["error"]["type"], expected["error"]["code"]) == (kind, code)
    streamed = _Call("/v1/completions", {**body, "stream": True}, leaves=False)
    asyncio.run(streamed.run(app))
    assert streamed.status == 200
    *_, last = streamed.content.decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: ")) == expected


def test_requests_of_open_paths_take_no_place_of_others() -> None:
    async def check() -> None:
        begun = asyncio.Event()
        released = asyncio.Event()

        async def app(scope: Message, receive: Any, send: Any) -> None:
            if scope["path"] == "/health":
                begun.set()
                await released.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        guard = Guard(app, None, None, max_requests=1, open_paths=frozenset({"/health"}))
        health = asyncio.ensure_future(_Call("/health", leaves=False).run(guard))
        await begun.wait()
        models = _Call("/v1/models", leaves=False)
        await models.run(guard)
        assert models.status == 200
        released.set()
        await health

    asyncio.run(check())


@pytest.mark.parametrize(
    "options", [{"context": 10**6}, {"template": "unknown"}, {"template": "missing.jinja"}], ids=str
)
def test_options_that_do_not_suit_a_model_are_refused_before_its_weights_are_read(
    options: dict[str, Any], demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **placement: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(server, "load_opened", fail)
    with pytest.raises(RequestError):
        load_for_serving(demo_model, ServeOptions(**options))


@pytest.mark.parametrize("options", [{"draft_tokens": 16}, {"context": 0}], ids=str)
def test_options_out_of_range_are_refused_without_a_model(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        ServeOptions(**options)
