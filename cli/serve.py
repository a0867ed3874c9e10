"""``quantkit serve``."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from quantkit.cli import options
from quantkit.cli.files import STDOUT
from quantkit.cli.options import RUN, Command, section
from quantkit.cli.output import mention, mention_memory, require_stdout
from quantkit.cli.processes import require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.serve import CONNECTIONS, KEPT, PORT, SLOTS, TIME_LIMIT, WAITING


@options.accept_threads
@click.command(cls=Command)
@click.argument("path", type=options.PATH)
@section(
    "Server",
    click.option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        help="Address to listen on; one that other machines can reach requires --api-key.",
    ),
    click.option(
        "--port",
        type=int,
        default=PORT,
        show_default=True,
        help="Port to listen on; 0 chooses a free one.",
    ),
    options.api_key("API key that requests must send as a Bearer token."),
    click.option(
        "--allowed-host",
        multiple=True,
        metavar="NAME",
        help=(
            "Host name that requests may use for this server, such as a proxy's; repeatable."
            " Default: this machine's names."
        ),
    ),
    click.option(
        "--name", metavar="NAME", help="Model name in the API. Default: the folder's name."
    ),
    click.option(
        "--waiting",
        type=int,
        default=WAITING,
        show_default=True,
        help="Maximum number of queued requests; further ones get 429.",
    ),
    click.option(
        "--connections",
        type=int,
        default=CONNECTIONS,
        show_default=True,
        help="Maximum number of open connections per client address; idle ones are closed first.",
    ),
    click.option(
        "--time-limit",
        type=float,
        default=TIME_LIMIT,
        show_default=True,
        metavar="SECONDS",
        help="Seconds allowed per request, including queueing; then 504.",
    ),
)
@section(options.SPECULATION, options.draft, options.draft_tokens)
@section(
    "Log",
    click.option(
        "--log",
        metavar="PATH",
        type=options.PATH,
        help=(
            "Append a JSON line for each request to this file; - is stdout. Prompts and"
            " keys are not logged."
        ),
    ),
    click.option(
        "--log-prompts", is_flag=True, help="Also log the messages and prompts of requests."
    ),
)
@section(
    RUN,
    click.option(
        "--slots",
        type=int,
        default=SLOTS,
        show_default=True,
        help="Maximum number of concurrent sequences.",
    ),
    click.option(
        "--kept",
        type=int,
        default=KEPT,
        show_default=True,
        help=(
            "Number of finished sequences kept in the KV cache, for requests with the same prefix."
        ),
    ),
    click.option(
        "--context",
        type=int,
        help="Maximum number of tokens per sequence. Default: the model's context, at most 8192.",
    ),
    click.option(
        "--template",
        metavar="NAME",
        shell_complete=options.complete_files,
        help="Chat template, as in quantkit chat.",
    ),
    options.dtype,
    options.backend(),
    options.allow_slow,
    options.device,
    options.int8_cache,
)
@options.weights
def serve(path: Path, log: Path | None, **params: Any) -> None:
    """Serve the model in PATH with OpenAI's API.

    Paths: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health,
    /metrics; / is a page to chat with it. Answers are those of `quantkit generate`. Ctrl-C or
    SIGTERM lets running requests end, for half a minute at most.
    """
    if params["log_prompts"] and log is None:
        raise RequestError("--log-prompts requires --log")
    require_models(path, params["draft"])

    from quantkit.serve.log_file import LogFile
    from quantkit.serve.server import ServeOptions, load_for_serving
    from quantkit.serve.server import serve as run_server

    requested = ServeOptions(**params)
    log_on_stdout = str(log) == STDOUT
    if log_on_stdout:
        require_stdout()
    with ExitStack() as stack:
        # The log is opened before minutes may be spent on loading a model.
        if log is None:
            write_log = None
        else:
            log_file = LogFile(sys.stdout.fileno() if log_on_stdout else log)
            write_log = stack.enter_context(log_file).write
        with ProgressDisplay() as progress:
            for_serving = load_for_serving(path, requested, progress=progress)

        def announce(address: str) -> None:
            """Print the addresses. A log on stdout has JSON lines alone, so they go to stderr."""
            mention_memory(
                for_serving.memory.text(for_serving.context, requested.slots), always=True
            )
            mention(
                f"serving {for_serving.name} at {address}/v1; Ctrl-C ends it", err=log_on_stdout
            )
            if for_serving.no_chat is None:
                mention(f"chat with it in a browser: {address}/", err=log_on_stdout)
            else:
                template = "--template NAME adds one"
                mention(
                    f"it has no chat template: only {address}/v1/completions answers; {template}",
                    err=log_on_stdout,
                )

        run_server(for_serving, requested, announce, log=write_log)
