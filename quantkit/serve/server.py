"""Serve a model until a signal ends it."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.base.arguments import as_integer, as_number, as_string
from quantkit.base.messages import Message, Option
from quantkit.base.progress import Progress, silent
from quantkit.errors import RequestError
from quantkit.formats.detect import WeightKind
from quantkit.grammar.grammars import Grammars
from quantkit.jobs.inference.load import (
    Placement,
    load_draft,
    load_opened,
    measure_opened,
    open_with_tokenizer,
)
from quantkit.kernels import BackendName
from quantkit.model.cache import cache_bytes
from quantkit.model.device import free_bytes
from quantkit.openai.request import CHAT, COMPLETIONS
from quantkit.prompts.builder import PromptBuilder
from quantkit.runtime.chat_session import conversation_length
from quantkit.runtime.engine import Engine
from quantkit.runtime.request import check_draft_tokens
from quantkit.serve import (
    CONNECTIONS,
    KEPT,
    PORT,
    SLOTS,
    TIME_LIMIT,
    WAITING,
    is_loopback,
    parse_host_name,
    require_packages,
)
from quantkit.serve.about import about
from quantkit.serve.worker import Worker
from quantkit.tensors.dtypes import FloatName
from quantkit.text.chat import chat_format
from quantkit.text.chat_template import META_FORMATS, ChatTemplates
from quantkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import uvicorn

    from quantkit.serve.app import Served

# New tokens of a completion by default, as in OpenAI's API.
_TEXT_TOKENS = 16
# Limits of the body of a request.
_BODY_BYTES = 8 << 20
_BODY_SECONDS = 30.0
# Time that running requests have to finish when the server shuts down.
_GRACE_SECONDS = 30
# Limits of slow clients, see `ConnectionLimits`.
_HEADER_SECONDS = 10.0
_WRITE_SECONDS = 30.0
# Time in which clients without a complete answer can read the error after the grace time.
_ERROR_SECONDS = 3
# The names of this machine in the header Host.
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class ServeOptions:
    """The options of a server.

    Attributes:
        host, port: where; port 0 is a free one.
        api_key: that requests must have; without one, only this machine may be served.
        allowed_host: more names by which requests may call this server, such as a proxy's.
        connections: that one address may have open.
        name: by which requests name the model; None is the folder's.
        slots: sequences that run at the same time.
        waiting: requests that may wait for these.
        time_limit: seconds that a request may wait and run.
        kept: sequences that ended and stay in the cache, so that others which begin with the same
            are read faster; as far as half of the free memory allows.
        context: tokens of a sequence; None is the model's, 8192 at most.
        template: for messages; see `quantkit.chat_format`.
        device, dtype, backend, allow_slow, weights: see `quantkit.load`.
        int8_cache: keep keys and values in int8.
        draft, draft_tokens: a smaller model that proposes tokens; how many are proposed at a time
            at most.
        log_prompts: also log the messages or prompts of requests.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    api_key: str | None = None
    allowed_host: tuple[str, ...] = ()
    connections: int = CONNECTIONS
    name: str | None = None
    slots: int = SLOTS
    waiting: int = WAITING
    time_limit: float = TIME_LIMIT
    kept: int = KEPT
    context: int | None = None
    template: str | None = None
    device: str | None = None
    dtype: FloatName | None = None
    backend: BackendName | None = None
    allow_slow: bool = False
    weights: WeightKind | None = None
    int8_cache: bool = False
    draft: Path | None = None
    draft_tokens: int | None = None
    log_prompts: bool = False

    def __post_init__(self) -> None:
        """Raise a `RequestError` for a value out of range, or a server that strangers could use
        without a key.
        """
        as_integer("slots", self.slots, 1)
        as_integer("waiting", self.waiting, 0)
        as_integer("kept", self.kept, 0)
        as_integer("connections", self.connections, 1)
        if self.context is not None:
            as_integer("context", self.context, 1)
        if self.draft_tokens is not None:
            check_draft_tokens(self.draft_tokens)
        for host in self.allowed_host:
            parse_host_name(host)
        if not as_number("time_limit", self.time_limit) > 0:
            raise RequestError(
                Message(Option("time_limit"), " must be positive"), found=self.time_limit
            )
        if not 0 <= as_integer("port", self.port) <= 65535:
            raise RequestError(
                Message(Option("port"), " is out of range"), found=self.port, expected="0 to 65535"
            )
        if self.api_key is not None and not as_string("api_key", self.api_key).strip():
            raise RequestError(Message(Option("api_key"), " is empty"))
        if self.api_key is None and not self.is_local_only:
            raise RequestError(
                "other machines could use this server without an API key",
                found=self.host,
                hint=Message("set ", Option("api_key")),
            )

    @property
    def is_local_only(self) -> bool:
        """Tell whether only this machine is served."""
        return is_loopback(self.host)

    @property
    def host_names(self) -> frozenset[str] | None:
        """Collect the names by which requests may call this server; None for any."""
        # A server for other machines needs a key, which pages of other sites do not have.
        if not self.is_local_only and not self.allowed_host:
            return None
        names = _LOCAL | {parse_host_name(host) for host in self.allowed_host}
        if not self._is_wildcard:
            # One of this machine's addresses, such as 127.0.0.2.
            names |= {self.name_in_address.lower()}
        return names

    @property
    def name_in_address(self) -> str:
        """Format the host for a URL."""
        # An IPv6 address is in brackets.
        if ":" in self.host:
            return f"[{self.host}]"
        return self.host

    @property
    def _is_wildcard(self) -> bool:
        """Tell whether the host is all addresses of this machine, such as 0.0.0.0."""
        try:
            return not self.host or ipaddress.ip_address(self.host).is_unspecified
        # The host is a name.
        except ValueError:
            return False


def load_for_serving(path: Path, options: ServeOptions, *, progress: Progress = silent) -> Served:
    """Load a model, ready to be served.

    Raises:
        RequestError: if a package is not installed, or the cache does not fit in memory.
        QuantkitError: as `quantkit.load` does.
    """
    # Before the import, which would fail with a less helpful error.
    require_packages()
    from quantkit.serve.app import Served

    checkpoint, tokenizer = open_with_tokenizer(path, options.weights, options.dtype)
    # Options that do not suit the model are reported before minutes are spent on its weights.
    context = conversation_length(checkpoint.config, options.context)
    no_chat = _find_chat_problem(path, tokenizer, options)
    placement: Placement = {
        "device": options.device,
        "dtype": options.dtype,
        "backend": options.backend,
        "allow_slow": options.allow_slow,
        "progress": progress,
    }
    memory = measure_opened(
        checkpoint,
        length=context,
        slots=options.slots,
        int8_cache=options.int8_cache,
        **placement,
    )
    model = load_opened(checkpoint, **placement)
    draft = None
    if options.draft is not None:
        draft = load_draft(options.draft, tokenizer, **placement)
    cache_dtype = torch.int8 if options.int8_cache else None
    slot_bytes = cache_bytes(model.config, 1, context, cache_dtype or model.dtype)
    if draft is not None:
        draft_context = min(context, draft.config.max_positions)
        slot_bytes += cache_bytes(draft.config, 1, draft_context, draft.dtype)
    # The whole cache takes at most half of the free memory, unless the running sequences need more.
    max_slots = free_bytes(model.device) // 2 // slot_bytes
    kept = min(options.kept, max(0, max_slots - options.slots))
    engine = Engine(
        model,
        context,
        slots=options.slots + kept,
        cache_dtype=cache_dtype,
        draft=draft,
        draft_tokens=options.draft_tokens,
    )
    grammars = Grammars(tokenizer, model.config.vocab_size, model.config.eos_token_ids)
    create_builder = functools.partial(
        PromptBuilder,
        path,
        model.config,
        tokenizer,
        template=options.template,
        max_tokens=engine.length,
        grammars=grammars,
    )
    # Answers to messages may use the rest of the context by default.
    builders = {
        CHAT: create_builder({}),
        COMPLETIONS: create_builder({"max_new_tokens": _TEXT_TOKENS}),
    }
    facts = {
        **about(path, options.weights),
        "run_bytes": memory.weight_bytes,
        "cache_bytes_per_token": memory.cache_bytes_per_token,
        "cache_slots": engine.slots,
        "chat": no_chat is None,
    }
    # Resolved, because a path such as "." has no name.
    name = path.resolve().name if options.name is None else options.name
    # Last, because it starts a thread.
    worker = Worker(
        engine,
        tokenizer,
        max_jobs=options.slots + options.waiting,
        max_running=options.slots,
        time_limit=options.time_limit,
    )
    return Served(
        name=name,
        worker=worker,
        tokenizer=tokenizer,
        builders=builders,
        grammars=grammars,
        context=engine.length,
        vocabulary=model.config.vocab_size,
        about=facts,
        memory=memory,
        no_chat=no_chat,
        max_body_bytes=_BODY_BYTES,
        max_body_seconds=_BODY_SECONDS,
    )


def _find_chat_problem(
    path: Path, tokenizer: Tokenizer, options: ServeOptions
) -> RequestError | None:
    """Create the error for messages to a model without a chat template; None if it has one.

    Raises:
        RequestError, CheckpointError: if the requested template cannot be used: no request could be
            answered with it.
    """
    if options.template is not None:
        chat_format(path, tokenizer, options.template)
        return None
    if ChatTemplates(path):
        return None
    return RequestError(
        "the model has no chat template",
        expected="a prompt, at /v1/completions",
        hint=(
            f"for messages, start the server with --template {', '.join(META_FORMATS)} or a file"
            " *.jinja"
        ),
    )


def serve(
    served_model: Served,
    options: ServeOptions,
    began: Callable[[str], None],
    *,
    log: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM: then running requests have half a minute to end.

    Args:
        began: called with the server's address once it takes requests.
        log: called with what there is to log of each request once it has ended; see `RequestLog`.

    Raises:
        RequestError: if the address cannot be used.
    """
    import uvicorn

    from quantkit.serve.app import application
    from quantkit.serve.connection import Connection, ConnectionLimits, Connections

    app = application(
        served_model,
        api_key=options.api_key,
        hosts=options.host_names,
        # More than can run and wait, so that the others are refused with a status of their own.
        max_requests=2 * (options.slots + options.waiting) + 16,
        log=log,
        log_prompts=options.log_prompts,
    )
    limits = ConnectionLimits(
        options.connections, header_seconds=_HEADER_SECONDS, write_seconds=_WRITE_SECONDS
    )
    protocol: Any = functools.partial(Connection, connections=Connections(limits))
    config = uvicorn.Config(
        app,
        options.host,
        options.port,
        http=protocol,
        ws="none",
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS + _ERROR_SECONDS,
    )
    # asyncio warns about each client that disconnects while it is answered.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    try:
        # uvicorn ends the process if the address cannot be used.
        try:
            socket = config.bind_socket()
        except SystemExit as error:
            address = f"{options.host}:{options.port}"
            raise RequestError(
                "the server cannot use this address", found=address, hint="choose another port"
            ) from error
        with socket:
            # A reader of the address may connect at once, before uvicorn runs.
            socket.listen(config.backlog)
            began(f"http://{options.name_in_address}:{socket.getsockname()[1]}")
            # uvicorn raises the signal again after it has shut down.
            with suppress(KeyboardInterrupt):
                _ending_server(config, served_model.worker).run(sockets=[socket])
    finally:
        served_model.worker.stop()


def _ending_server(config: uvicorn.Config, worker: Worker) -> uvicorn.Server:
    """Create a server that ends requests that still run after the grace time.

    Their clients then read an error; uvicorn alone would close the connections.
    """
    import uvicorn

    async def end_requests() -> None:
        await asyncio.sleep(_GRACE_SECONDS)
        await asyncio.to_thread(worker.stop)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[Any] | None = None) -> None:
            # uvicorn waits for running requests, so this runs at the same time.
            end_task = asyncio.ensure_future(end_requests())
            try:
                await super().shutdown(sockets)
            finally:
                end_task.cancel()

    return Server(config)
