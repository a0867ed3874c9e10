"""``quantkit chat``."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from quantkit.base.json_values import spell_control_characters
from quantkit.cli import options
from quantkit.cli.conversation import Alone, converse
from quantkit.cli.options import RUN, Command, section
from quantkit.cli.output import is_rank0_process, mention_memory, require_stdout, warn
from quantkit.cli.processes import is_single_process, join_group, require_models
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.runtime.generation_config import sampling_defaults
from quantkit.runtime.request import check_max_new_tokens
from quantkit.text.chat import chat_format
from quantkit.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from quantkit.distributed.group import ProcessGroup
    from quantkit.runtime.chat_session import ChatSession
    from quantkit.runtime.sampling_params import SamplingOptions


# Options for a model that this process loads. A server has loaded its model already.
_LOCAL = (
    "template",
    "context",
    "draft",
    "draft_tokens",
    "dtype",
    "backend",
    "allow_slow",
    "device",
    "int8_cache",
    "compiled",
    "weights",
    "threads",
)
_REMOTE = ("api_key", "model")


@options.accept_threads
@click.command(cls=Command)
@click.argument("path", type=options.PATH, required=False)
@section(
    "Server",
    click.option(
        "--url",
        metavar="URL",
        help="Chat with a server of OpenAI's API, such as http://HOST:PORT/v1.",
    ),
    options.api_key("Key that the server requires."),
    click.option(
        "--model", metavar="NAME", help="Name of the model on the server. Default: its only model."
    ),
)
@section(
    "Conversation",
    click.option(
        "--template",
        metavar="NAME",
        shell_complete=options.complete_files,
        help=(
            "llama2, llama3, one of the folder's templates by name, or a file *.jinja. Default: the"
            " folder's own."
        ),
    ),
    click.option("--system", metavar="TEXT", help="System prompt."),
    click.option(
        "--context",
        type=int,
        help=(
            "Maximum number of tokens in the conversation. Default: the model's context, at most"
            " 8192."
        ),
    ),
)
@section("Sampling", options.sampling(1024, " in an answer"))
@section(options.SPECULATION, options.draft, options.draft_tokens)
@section(
    RUN,
    options.dtype,
    options.backend(),
    options.allow_slow,
    options.device,
    options.int8_cache,
    options.compiled,
)
@options.weights
def chat(url: str | None, api_key: str | None, model: str | None, **params: Any) -> None:
    """Chat with the instruct model in PATH.

    With --url instead of PATH, the model of a running server answers, such as that of `quantkit
    serve`; its own sampling options and maximum length then apply, unless given here.

    Answers appear as they are generated. The sampling options of the model's generation_config.json
    apply, unless given here. Ctrl-C stops an answer; /help lists the commands. When the context is
    full, the oldest questions and answers are dropped.

    If stdin or stdout is not a terminal, each line of stdin is a question, and only answers are
    printed. Under torchrun all processes share the model, and rank 0 reads the questions.
    """

    if (url is None) == (params["path"] is None):
        if url:
            problem = "PATH and --url are mutually exclusive"
        else:
            problem = "neither PATH nor --url is given"
        raise RequestError(problem)
    if url is not None:
        _require_unused(_LOCAL, "PATH")
        _talk_to_server(url, api_key, model, params)
        return
    _require_unused(_REMOTE, "--url")

    def check() -> None:
        """Raise a `RequestError` or `CheckpointError` for an option, a model or a chat template
        that cannot be used.
        """
        if is_rank0_process():
            require_stdout()
        options.validate_sampling_options(params)
        check_max_new_tokens(params["max_new_tokens"])
        require_models(params["path"], params["draft"])
        # For their errors alone: a wrong generation_config.json or template is reported before
        # the weights are loaded.
        sampling_defaults(params["path"])
        chat_format(params["path"], load_tokenizer(params["path"]), params["template"])

    # Each machine may have the models in another folder.
    common_options = {**params, "path": None, "draft": None}
    with join_group(common_options, params["device"], check=check) as group:
        session = _load_session(params, group)
        converse(session, group, str(params["path"]))


def _is_given(name: str) -> bool:
    """Return whether the command line contains an option, even with its default value."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _require_unused(names: Collection[str], required: str) -> None:
    """Raise a `RequestError` for an option on the command line that only makes sense with
    another one.
    """
    for option in click.get_current_context().command.params:
        if option.name in names and _is_given(option.name):
            spelling = "/".join((*option.opts, *option.secondary_opts))
            raise RequestError(f"{spelling} requires {required}")


def _talk_to_server(
    url: str, api_key: str | None, model: str | None, params: dict[str, Any]
) -> None:
    """Chat with the model of a server."""
    if not is_single_process():
        raise RequestError("--url cannot be used under torchrun")
    require_stdout()
    request: dict[str, Any] = dict(options.validate_sampling_options(params))
    # The option's default is for local models. Without the option, the server's maximum applies.
    if _is_given("max_new_tokens"):
        request["max_tokens"] = check_max_new_tokens(params["max_new_tokens"])
    if params["stop"]:
        request["stop"] = list(params["stop"])

    from quantkit.serve.client import Server
    from quantkit.serve.remote_chat import RemoteChat

    server = Server(url, api_key)
    if server.exposes_key:
        warn(
            f"the key and the conversation are sent to {server.url} without encryption; prefer"
            " https"
        )
    session = RemoteChat(server, model, system=params["system"], options=request)
    converse(
        session,
        Alone(),
        f"{spell_control_characters(session.model)} at {server.url}",
        lambda: session.usage,
    )


def _load_session(params: dict[str, Any], group: ProcessGroup) -> ChatSession:
    """Load the model, with its draft if there is one, and create a conversation with it."""
    import torch

    from quantkit.jobs.inference.load import (
        Placement,
        load_draft,
        load_opened,
        measure_opened,
        open_with_tokenizer,
    )
    from quantkit.runtime.chat_session import ChatSession, conversation_length
    from quantkit.runtime.engine import Engine

    path: Path = params["path"]
    draft = None
    with ProgressDisplay(show=group.is_rank0 and sys.stderr.isatty()) as progress:
        placement: Placement = {
            "device": group.device or params["device"],
            "dtype": params["dtype"],
            "backend": params["backend"],
            "allow_slow": params["allow_slow"],
            "tp": group,
            "progress": progress,
        }
        checkpoint, tokenizer = open_with_tokenizer(path, params["weights"], params["dtype"])
        length = conversation_length(checkpoint.config, params["context"])
        memory = measure_opened(
            checkpoint, length=length, int8_cache=params["int8_cache"], **placement
        )
        if group.is_rank0:
            mention_memory(memory.text(length))
        model = load_opened(checkpoint, **placement)
        if params["draft"] is not None:
            draft = load_draft(params["draft"], tokenizer, **placement)
    if params["int8_cache"]:
        cache_dtype = torch.int8
    else:
        cache_dtype = None
    # Options of the command line come last, so they override those of the model's folder.
    sampling: SamplingOptions = {
        **sampling_defaults(path),
        **options.validate_sampling_options(params),
    }
    engine = Engine(
        model,
        length,
        cache_dtype=cache_dtype,
        compiled=params["compiled"],
        draft=draft,
        draft_tokens=params["draft_tokens"],
    )
    return ChatSession(
        engine,
        tokenizer,
        chat_format(path, tokenizer, params["template"]),
        system=params["system"],
        max_new_tokens=params["max_new_tokens"],
        stop=params["stop"],
        **sampling,
    )
