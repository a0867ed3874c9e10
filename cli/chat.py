"""``quantkit chat``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.conversation import converse
from quantkit.cli.options import RUN, Command, section
from quantkit.cli.output import is_rank0_process, require_stdout
from quantkit.cli.processes import require_models, together
from quantkit.cli.progress import ProgressDisplay
from quantkit.runtime.generation_config import sampling_defaults
from quantkit.runtime.request import checked_count
from quantkit.text.chat import chat_format
from quantkit.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from quantkit.distributed.group import ProcessGroup
    from quantkit.runtime.chat_session import ChatSession
    from quantkit.runtime.sampling_params import SamplingOptions


@click.command(cls=Command)
@click.argument("path", type=options.PATH)
@section(
    "Conversation",
    click.option(
        "--template", metavar="NAME", shell_complete=options.complete_files,
        help="llama2, llama3, one of the folder's templates by name, or a file *.jinja. Default: the folder's own.",
    ),
    click.option("--system", metavar="TEXT", help="System prompt."),
    click.option(
        "--context", type=int, help="Tokens of the conversation to keep. Default: the model's context, at most 8192."
    ),
)  # fmt: skip
@section("Sampling", options.sampling(1024, " in an answer"))
@section(options.SPECULATION, options.draft, options.draft_tokens)
@section(
    RUN, options.dtype, options.backend(), options.allow_slow, options.device, options.int8_cache, options.compiled
)  # fmt: skip
@options.weights
def chat(**given: Any) -> None:
    """Chat with the instruct model in PATH.

    Answers appear as they are generated. The sampling options of the model's generation_config.json apply, unless
    given here. Ctrl-C stops an answer; /help lists the commands. When the context is full, the oldest questions and
    answers are dropped.

    If stdin or stdout is not a terminal, each line of stdin is a question, and only answers are printed. Under
    torchrun all processes share the model, and rank 0 reads the questions.
    """

    def check() -> None:
        """Raise a `RequestError` or `CheckpointError` for an option, a model or a chat template that cannot be used."""
        if is_rank0_process():
            require_stdout()
        options.requested_sampling(given)
        checked_count(given["max_new_tokens"])
        require_models(given["path"], given["draft"])
        sampling_defaults(given["path"])
        chat_format(given["path"], load_tokenizer(given["path"]), given["template"])

    with together({**given, "path": None, "draft": None}, given["device"], check=check) as group:
        session = _session(given, group)
        converse(session, group, str(given["path"]))


def _session(given: dict[str, Any], group: ProcessGroup) -> ChatSession:
    import torch

    from quantkit.jobs.load import Placement, load, load_draft
    from quantkit.runtime.chat_session import ChatSession, conversation_length
    from quantkit.runtime.engine import Engine

    path: Path = given["path"]
    draft = None
    with ProgressDisplay(show=group.is_rank0 and sys.stderr.isatty()) as progress:
        placement: Placement = {
            "device": group.device or given["device"], "dtype": given["dtype"], "backend": given["backend"],
            "allow_slow": given["allow_slow"], "tp": group, "progress": progress,
        }  # fmt: skip
        model, tokenizer = load(path, weights=given["weights"], **placement)
        if given["draft"] is not None:
            draft = load_draft(given["draft"], tokenizer, **placement)
    length = conversation_length(model.config, given["context"])
    cache = torch.int8 if given["int8_cache"] else None
    sampling: SamplingOptions = {**sampling_defaults(path), **options.requested_sampling(given)}
    engine = Engine(
        model, length, cache_dtype=cache, compiled=given["compiled"], draft=draft, draft_tokens=given["draft_tokens"]
    )
    return ChatSession(
        engine, tokenizer,
        chat_format(path, tokenizer, given["template"]), system=given["system"],
        max_new_tokens=given["max_new_tokens"], stop=given["stop"],
        **sampling,
    )  # fmt: skip
