"""``quantkit chat``."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.entry import raise_if_interrupted
from quantkit.cli.help import Command
from quantkit.cli.output import mention
from quantkit.cli.processes import require_models, together
from quantkit.cli.progress import ProgressDisplay
from quantkit.cli.spelling import as_options
from quantkit.errors import RequestError
from quantkit.runtime.generation_config import sampling_defaults
from quantkit.runtime.request import checked_count
from quantkit.text.chat import chat_format
from quantkit.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from quantkit.distributed.group import ProcessGroup
    from quantkit.runtime.chat_session import ChatSession
    from quantkit.runtime.sampling_params import SamplingOptions

_COMMANDS = {
    "/system": "set the system prompt to the text after it, or to none",
    "/reset": "forget what was said",
    "/help": "show this",
    "/exit": "leave, as Ctrl-D does",
}
_LEAVE = ("/exit", "/quit", "/bye")
_COMMAND = re.compile(r"/[a-z]+(?=\s|$)")


@click.command(cls=Command)
@click.argument("path", type=options.PATH)
@click.option(
    "--template", metavar="NAME", shell_complete=options.complete_files,
    help="llama2, llama3, one of the folder's templates by name, or a file *.jinja; the folder's own by default.",
)  # fmt: skip
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--context", type=int, help="Tokens to remember; the model's context by default, 8192 at most.")
@options.sampling(1024, " in an answer")
@options.dtype
@options.backend()
@options.device
@options.int8_cache
@options.compiled
@options.weights
def chat(**given: Any) -> None:
    """Talk with the instruct model in PATH.

    Answers appear as they are generated. Tokens are drawn as the model's generation_config.json says, unless options
    say otherwise. Ctrl-C stops an answer; /help tells what else may be typed. Once the context is full the oldest
    questions and answers are forgotten.

    Where stdin or stdout is no terminal each line of stdin is a question, and answers alone are printed. Under
    torchrun all processes share the model, and the first one asks.
    """
    with together({**given, "path": None}, given["device"], check=lambda: _require_sense(given)) as group:
        session = _session(given, group)
        on_terminal = group.agree(sys.stdin.isatty() and sys.stdout.isatty())
        if on_terminal:
            _talk(session, group, given["path"])
        else:
            _answer_lines(session, group)


def _require_sense(given: dict[str, Any]) -> None:
    """
    Raises:
        RequestError: if numbers are out of range, or the model has no chat template.
        CheckpointError: if there is no model, or its settings are damaged.
    """
    options.asked_sampling(given)
    checked_count(given["max_new_tokens"])
    require_models(given["path"])
    sampling_defaults(given["path"])
    chat_format(given["path"], load_tokenizer(given["path"]), given["template"])


def _session(given: dict[str, Any], group: ProcessGroup) -> ChatSession:
    import torch

    from quantkit.jobs.load import load
    from quantkit.runtime.chat_session import ChatSession, conversation_length
    from quantkit.runtime.engine import Engine

    path: Path = given["path"]
    with ProgressDisplay(show=group.first and sys.stderr.isatty()) as progress:
        model, tokenizer = load(
            path, device=group.device or given["device"], dtype=given["dtype"], backend=given["backend"],
            weights=given["weights"], tp=group, progress=progress,
        )  # fmt: skip
    length = conversation_length(model.config, given["context"])
    cache = torch.int8 if given["int8_cache"] else None
    sampling: SamplingOptions = {**sampling_defaults(path), **options.asked_sampling(given)}
    return ChatSession(
        Engine(model, length, cache_dtype=cache, compiled=given["compiled"]), tokenizer,
        chat_format(path, tokenizer, given["template"]), system=given["system"],
        max_new_tokens=given["max_new_tokens"], stop=given["stop"],
        **sampling,
    )  # fmt: skip


def _answer_lines(session: ChatSession, group: ProcessGroup) -> None:
    """Answer each line of stdin, and print nothing else."""
    lines = _lines() if group.first else iter(())
    while (line := group.agree(next(lines, None))) is not None:
        if _is_command(line):
            if _obey(session, line) == "leave":
                return
            continue
        for piece in session.ask(line):
            raise_if_interrupted()
            if group.first:
                click.echo(piece, nl=False)
        if group.first:
            click.echo()


def _lines() -> Iterator[str]:
    """The lines of stdin that are not empty.

    Raises:
        RequestError: if one is no text.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise RequestError(
                "the question is not a text", path="-", found=f"line {number}", expected="UTF-8"
            ) from error
        if text:
            yield text


def _talk(session: ChatSession, group: ProcessGroup, path: Path) -> None:
    """A conversation on a terminal."""
    questions = _questions(path) if group.first else iter(())
    while (line := group.agree(next(questions, None))) is not None:
        if not line:
            continue
        try:
            if _is_command(line):
                told = _obey(session, line)
                if told == "leave":
                    return
                if group.first:
                    mention(told)
            else:
                _answer(session, group, line)
        except RequestError as error:  # this question's fault
            if group.first:
                mention(f"quantkit: error: {as_options(str(error))}", err=True)


def _answer(session: ChatSession, group: ProcessGroup, question: str) -> None:
    with _interruptible() as interrupted:
        for piece in session.ask(question, interrupted=lambda: group.agree(interrupted())):
            if group.first:
                click.echo(piece, nl=False)
    if group.first:
        click.echo()
        if session.finish_reason == "length":
            mention("quantkit: note: the answer was cut off: it may have no more tokens", err=True)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has come, which raises nothing meanwhile: a step that is begun is ended."""
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def _questions(path: Path) -> Iterator[str]:
    """What is typed, line by line, until Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    words = WordCompleter(list(_COMMANDS), sentence=True)
    prompts: PromptSession[str] = PromptSession("> ", completer=words, complete_while_typing=False)
    mention(f"{path}: /help tells the commands, Ctrl-D leaves")
    while True:
        try:
            yield prompts.prompt().strip()
        except EOFError:
            return
        except KeyboardInterrupt:  # it was typed, and clears the line
            raise_if_interrupted()  # SIGTERM was not
            if not prompts.default_buffer.text:
                mention("Ctrl-D leaves.")


def _is_command(line: str) -> bool:
    return _COMMAND.match(line) is not None


def _obey(session: ChatSession, line: str) -> str:
    """Carry out a command.

    Returns:
        What to tell of it; ``leave`` for one that ends the conversation.

    Raises:
        RequestError: if there is no such command.
    """
    name, _, text = line.partition(" ")
    if name in _LEAVE:
        return "leave"
    if name == "/reset":
        session.reset()
        return "What was said is forgotten."
    if name == "/system":
        session.system = text.strip() or None
        return "The system prompt is set." if session.system else "There is no system prompt."
    if name == "/help":
        return "\n".join(f"{command:<8} {about}" for command, about in _COMMANDS.items())
    raise RequestError("no such command", found=name, expected=", ".join(_COMMANDS))
