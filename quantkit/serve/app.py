"""The server's paths: OpenAI's chat completions, completions and models, tokens of texts,
health, metrics and page.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quantkit.base.arguments import as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.base.strict_json import parse_strict_object
from quantkit.errors import QuantkitError, RequestError
from quantkit.grammar.grammars import Grammars
from quantkit.model.run_memory import RunMemory
from quantkit.openai.chunks import ResponseStream
from quantkit.openai.errors import error_to_json
from quantkit.openai.fields import require_keys
from quantkit.openai.models import build_model, build_model_list
from quantkit.openai.parse import PARSERS, parse_request
from quantkit.openai.request import CHAT, ApiRequest
from quantkit.openai.responses import ResponseBuilder
from quantkit.openai.stream_options import pop_stream_options
from quantkit.prompts.builder import PromptBuilder
from quantkit.prompts.prompt import Prompt
from quantkit.runtime.request import Completion, Delta, PromptLengthError
from quantkit.runtime.request import Request as GenerationRequest
from quantkit.runtime.token_texts import TokenTexts
from quantkit.serve.events import DONE, encode_event
from quantkit.serve.guard import RETRY, Guard, Receive, Scope, Send
from quantkit.serve.log import CLIENT_GONE, RequestLog, record_answer
from quantkit.serve.metrics import Metrics
from quantkit.serve.page.routes import FILES, page_routes
from quantkit.serve.worker import Job, TimeLimitError, Worker
from quantkit.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_EXPECTED_BODY = '{"prompt": "..."} or {"messages": [...]}'
# Characters of a body that is parsed in the event loop; longer ones are parsed in a thread.
_SHORT = 1 << 16
# Answers to a prompt, as in OpenAI's API.
_MAX_SAMPLES = 128
# Answers to a request: each has a sampler and a text.
_MAX_CHOICES = 1024
# Stop strings: each is searched for with every token.
_MAX_STOPS = 256
# The server does not wait for the remaining body, so the connection cannot be used again.
_CLOSE = {"Connection": "close"}


@dataclass(frozen=True)
class Served:
    """A model that is served.

    Attributes:
        name: by which requests name it.
        builders: encode the prompts of each API's requests, by the API's path.
        grammars: what the model's answers may have to follow.
        context, vocabulary: tokens of a sequence, and those that the model knows.
        about: what its folder states about it; see `quantkit.serve.about`.
        memory: what the model takes to run.
        no_chat: the error for messages if the model has no chat template; None if it has one.
        max_body_bytes, max_body_seconds: what a request's body may have, and take.
    """

    name: str
    worker: Worker
    tokenizer: Tokenizer
    builders: Mapping[str, PromptBuilder]
    grammars: Grammars
    context: int
    vocabulary: int
    about: Mapping[str, Any]
    memory: RunMemory
    no_chat: RequestError | None
    max_body_bytes: int
    max_body_seconds: float


def application(
    served: Served,
    *,
    api_key: str | None,
    hosts: frozenset[str] | None,
    max_requests: int,
    log: Callable[[Mapping[str, Any]], None] | None = None,
    log_prompts: bool = False,
) -> Any:
    """Create the ASGI application.

    Args:
        api_key: that requests must have, but for the health and the files of the page; None for
            none.
        hosts: the names that requests may have for this server; None for any.
        max_requests: at the same time, also before they are read.
        log, log_prompts: see `RequestLog`.
    """
    handlers = _Handlers(served, Metrics(served.worker))
    routes = [
        Route("/health", lambda request: _health(served)),
        Route("/v1/models", handlers.convert_errors(handlers.models)),
        Route("/v1/models/{name:path}", handlers.convert_errors(handlers.model)),
        Route("/tokenize", handlers.convert_errors(handlers.tokenize), methods=["POST"]),
        Route("/detokenize", handlers.convert_errors(handlers.detokenize), methods=["POST"]),
        Route("/metrics", handlers.metrics),
        *page_routes(),
    ]
    for url in PARSERS:
        routes.append(Route(url, handlers.convert_errors(handlers.generate), methods=["POST"]))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(served.worker.stop)

    app = Starlette(
        routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _answer_http_error}
    )
    # Paths are exact: one with another slash at its end does not exist, and is not redirected.
    app.router.redirect_slashes = False
    guarded = Guard(
        app, api_key, hosts, max_requests=max_requests, open_paths=frozenset({"/health", *FILES})
    )
    return RequestLog(guarded, log, prompts=log_prompts)


class _UnknownModelError(RequestError):
    """A request names a model that is not served."""


class _EventStream(StreamingResponse):
    """A stream of events, whose request is cancelled once it ends or the client disconnects."""

    def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None]) -> None:
        # The second header keeps nginx from buffering the stream.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the generator: it never begins if the client disconnects before the first event.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


class _Handlers:
    """Answers the requests to each of the server's paths."""

    def __init__(self, served: Served, metrics: Metrics) -> None:
        self._served = served
        self._metrics = metrics
        self._texts = TokenTexts(served.tokenizer)
        self._created = int(time.time())
        # One thread of its own compiles formats, so that other requests do not wait for that.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="quantkit-formats")

    def convert_errors(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler so that it answers errors as OpenAI's API does."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except QuantkitError as error:
                return _create_error_response(*self._describe_error(error))
            # Nobody reads this response, but the log has its status.
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except HTTPException:
                raise
            except Exception:
                _log.exception("a request failed")
                return _create_error_response(
                    500, error_to_json("internal error", kind="server_error")
                )

        return answer

    def _describe_error(self, error: QuantkitError) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an error, as OpenAI's API has them."""
        if isinstance(error, _UnknownModelError):
            return 404, error_to_json(error, code="model_not_found")
        if isinstance(error, TimeLimitError):
            return 504, error_to_json(error, kind="server_error", code="timeout")
        if isinstance(error, PromptLengthError):
            return 400, error_to_json(error, code="context_length_exceeded")
        if isinstance(error, RequestError):
            return 400, error_to_json(error)
        # A worker that is stopping ends its requests with an error.
        status = 500 if self._served.worker.alive else 503
        return status, error_to_json(error, kind="server_error")

    async def generate(self, request: Request) -> Response:
        """Answer messages, or continue a text."""
        body = await self._body(request)
        stream_options = pop_stream_options(body)
        self._require_model(body)
        url = request.url.path
        if url == CHAT and self._served.no_chat is not None:
            raise self._served.no_chat
        loop = asyncio.get_running_loop()
        has_format = body.get("response_format") is not None or body.get("tools") is not None
        # Templates and tokenizers take time, so they do not run in the event loop.
        threads = self._compiling if has_format else None
        api_request, prompts = await loop.run_in_executor(threads, self._build_prompts, url, body)
        _require_few(prompts)
        requests = await loop.run_in_executor(
            threads, _bind_grammars, prompts, self._served.grammars
        )
        events: asyncio.Queue[Delta | QuantkitError] = asyncio.Queue()

        # The worker's thread calls this; queues of asyncio belong to the loop's thread.
        def deliver(event: Delta | QuantkitError) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        job = self._served.worker.submit(requests, prompts[0].stop, deliver)
        if job is None:
            self._metrics.refused.inc()
            busy = error_to_json(
                "too many requests at once; try again",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )
            return _create_error_response(429, busy, RETRY)
        responses = ResponseBuilder(
            request=api_request,
            prompts=prompts,
            texts=self._texts,
            request_id=secrets.token_hex(12),
            model=self._served.name,
            created=int(time.time()),
        )
        count_delta = self._metrics.begin_counting(requests)
        record_delta = record_answer(request.scope, requests, body, count_delta)
        if stream_options is not None:
            stream = ResponseStream(responses, with_usage=stream_options.include_usage)
            pieces = self._stream(stream, events, record_delta)
            return _EventStream(pieces, functools.partial(self._served.worker.cancel, job))
        return await self._respond_complete(request, responses, job, events, record_delta)

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse(build_model_list([self._describe_model()]))

    async def model(self, request: Request) -> Response:
        """Describe a model by its name."""
        name = request.path_params["name"]
        self._require_model({"model": name})
        return JSONResponse(self._describe_model())

    async def tokenize(self, request: Request) -> Response:
        """Encode a text, and return its tokens."""
        body = await self._body(request)
        require_keys(body, {"model", "prompt", "add_special_tokens"})
        self._require_model(body)
        text = as_string("prompt", body.get("prompt"))
        add_bos = body.get("add_special_tokens", True)
        require_flags(add_special_tokens=add_bos)
        tokens = await asyncio.to_thread(self._served.tokenizer.encode, text, bos=add_bos)
        return JSONResponse(
            {"count": len(tokens), "max_model_len": self._served.context, "tokens": tokens}
        )

    async def detokenize(self, request: Request) -> Response:
        """Decode tokens, and return their text."""
        body = await self._body(request)
        require_keys(body, {"model", "tokens"})
        self._require_model(body)
        tokens = body.get("tokens")
        if not _is_token_list(tokens):
            raise RequestError(
                "'tokens' is of the wrong type",
                found=format_value(tokens),
                expected="a list of token ids",
                argument="tokens",
            )
        if max(tokens, default=0) >= self._served.vocabulary:
            raise RequestError(
                "'tokens' has ids outside the vocabulary",
                found=max(tokens),
                expected=f"less than {self._served.vocabulary}",
                argument="tokens",
            )
        text = await asyncio.to_thread(self._served.tokenizer.decode, tokens)
        return JSONResponse({"prompt": text})

    async def metrics(self, request: Request) -> Response:
        """Export counts and times, as Prometheus reads them."""
        content, kind = self._metrics.export_text()
        return Response(content, headers={"Content-Type": kind})

    def _build_prompts(self, url: str, body: Mapping[str, Any]) -> tuple[ApiRequest, list[Prompt]]:
        """Parse the body of a request to the API with a path, and encode its prompts."""
        api_request = parse_request(url, body)
        return api_request, api_request.build_prompts(self._served.builders[url])

    async def _stream(
        self,
        stream: ResponseStream,
        events: asyncio.Queue[Delta | QuantkitError],
        record_delta: Any,
    ) -> AsyncIterator[bytes]:
        """Yield the events of an answer."""
        completions: list[Completion] = []
        for chunk in stream.begin():
            yield encode_event(chunk)
        while len(completions) < stream.num_choices:
            event = await events.get()
            # The status 200 has been sent, so the error is the last event of the stream.
            if isinstance(event, QuantkitError):
                _, content = self._describe_error(event)
                yield encode_event(content)
                return
            record_delta(event)
            for chunk in stream.add(event):
                yield encode_event(chunk)
            if event.completion is not None:
                completions.append(event.completion)
        for chunk in stream.end(completions):
            yield encode_event(chunk)
        yield DONE

    async def _respond_complete(
        self,
        request: Request,
        responses: ResponseBuilder,
        job: Job,
        events: asyncio.Queue[Delta | QuantkitError],
        record_delta: Any,
    ) -> Response:
        """Return a complete answer; if the client disconnects, cancel the request."""
        completions: list[Completion] = []
        # While nothing is sent, only reading from the connection tells that the client is gone.
        disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            while len(completions) < responses.num_choices:
                next_event = asyncio.ensure_future(events.get())
                await asyncio.wait((next_event, disconnect), return_when=asyncio.FIRST_COMPLETED)
                if not next_event.done():
                    next_event.cancel()
                    raise ClientDisconnect
                event = next_event.result()
                if isinstance(event, QuantkitError):
                    raise event
                record_delta(event)
                if event.completion is not None:
                    completions.append(event.completion)
        finally:
            disconnect.cancel()
            self._served.worker.cancel(job)
        return JSONResponse(responses.build(completions))

    async def _body(self, request: Request) -> dict[str, Any]:
        """Read the JSON object in the body of a request.

        Raises `RequestError` if there is none, and `HTTPException` if it is too large or arrives
        too slowly.
        """
        # Pages of other sites can send some types without asking the server, but not this one.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, "the body must be application/json")
        # A small compressed body could need any amount of memory.
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            raise HTTPException(
                415, "the body must not be compressed", headers={"Accept-Encoding": "identity"}
            )
        content = bytearray()
        try:
            async with asyncio.timeout(self._served.max_body_seconds):
                async for part in request.stream():
                    content += part
                    if len(content) > self._served.max_body_bytes:
                        problem = f"the body has more than {self._served.max_body_bytes} bytes"
                        raise HTTPException(413, problem, headers=_CLOSE)
        except TimeoutError as error:
            raise HTTPException(408, "the body came too slowly", headers=_CLOSE) from error
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise RequestError("the body is not UTF-8") from error
        if not text.strip():
            raise RequestError("the body is empty", expected="a JSON object")
        # Other requests continue while a thread parses a long body.
        if len(text) > _SHORT:
            return await asyncio.to_thread(parse_strict_object, text, _EXPECTED_BODY)
        return parse_strict_object(text, _EXPECTED_BODY)

    def _describe_model(self) -> dict[str, Any]:
        """Describe the model in the form of OpenAI's API."""
        served = self._served
        return build_model(
            served.name, created=self._created, context=served.context, about=served.about
        )

    def _require_model(self, body: Mapping[str, Any]) -> None:
        """Raise an error if a request names another model, or something that is no name."""
        name = body.get("model")
        # Without a name it is the only model.
        if name is None:
            return
        if as_string("model", name) != self._served.name:
            problem = (
                f"the model {format_value(name)} is not served here;"
                f" {format_value(self._served.name)} is"
            )
            raise _UnknownModelError(problem, argument="model")


def _require_few(prompts: Sequence[Prompt]) -> None:
    """Raise a `RequestError` if a request has too many answers or stop strings."""
    samples = prompts[0].request.samples
    stops = prompts[0].stop
    if samples > _MAX_SAMPLES:
        raise RequestError(
            "n is out of range", found=samples, expected=f"1 to {_MAX_SAMPLES}", argument="n"
        )
    if samples * len(prompts) > _MAX_CHOICES:
        raise RequestError(
            "too many answers in one request",
            found=f"{len(prompts)} prompts with {samples} each",
            expected=f"at most {_MAX_CHOICES}",
            argument="n",
        )
    if len(stops) > _MAX_STOPS:
        raise RequestError(
            "'stop' has too many strings",
            found=len(stops),
            expected=f"at most {_MAX_STOPS}",
            argument="stop",
        )


def _bind_grammars(prompts: Sequence[Prompt], grammars: Grammars) -> list[GenerationRequest]:
    """Compile the formats of prompts, and return their requests with constraints."""
    return [prompt.bind_grammar(grammars) for prompt in prompts]


def _is_token_list(value: object) -> TypeGuard[list[int]]:
    """Tell whether a JSON value is a list of numbers that are not negative."""
    if not isinstance(value, list):
        return False
    # The exact type: a bool is an int in Python.
    return all(type(token) is int and token >= 0 for token in value)


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _health(served: Served) -> Response:
    """Answer whether the server accepts requests."""
    if served.worker.alive:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "stopping"}, 503)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer starlette's own errors, such as an unknown path, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    return _create_error_response(error.status_code, error_to_json(error.detail), error.headers)


def _create_error_response(
    status: int, content: dict[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    return JSONResponse(content, status, dict(headers or {}))
