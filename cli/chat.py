"""``quantkit chat``."""

from __future__ import annotations

import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.entry import raise_if_interrupted
from quantkit.cli.options import RUN, Command, section
from quantkit.cli.output import as_options, is_rank0_process, mention, note, require_stdout
from quantkit.cli.processes import require_models, together
from quantkit.cli.progress import ProgressDisplay
from quantkit.errors import RequestError
from quantkit.json_values import shown
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
    "/reset": "start a new conversation",
    "/help": "show this list",
    "/exit": "exit, as Ctrl-D does",
}
_ESCAPED = "//word", "a question that begins with /word"
_LEAVE = ("/exit", "/quit", "/bye")
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.IGNORECASE | re.DOTALL)


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
        on_terminal = group.broadcast_from_rank0(sys.stdin.isatty() and sys.stdout.isatty())
        if on_terminal:
            _talk(session, group, given["path"])
        else:
            _answer_lines(session, group)


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


def _answer_lines(session: ChatSession, group: ProcessGroup) -> None:
    """Answer each line of stdin, and print only the answers."""
    lines = _lines() if group.is_rank0 else iter(())
    while (line := group.broadcast_from_rank0(next(lines, None))) is not None:
        if (command := _command(line)) is not None:
            name, text = command
            if name in (*_COMMANDS, *_LEAVE):
                if _run_command(session, name, text) == "leave":
                    return
                continue
            note(f"{name} is not a command, so the line is a question; //{name[1:]} makes that explicit")
        for piece in session.ask(_question(line)):
            raise_if_interrupted()
            if group.is_rank0:
                click.echo(piece, nl=False)
        if group.is_rank0:
            click.echo()


def _lines() -> Iterator[str]:
    """The lines of stdin that are not empty. Raises `RequestError` if one is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise RequestError(
                "the question cannot be decoded", path="-", found=f"line {number}", expected="UTF-8"
            ) from error
        if text:
            yield text


def _talk(session: ChatSession, group: ProcessGroup, path: Path) -> None:
    """A conversation on a terminal."""
    questions = _questions(path) if group.is_rank0 else iter(())
    while (line := group.broadcast_from_rank0(next(questions, None))) is not None:
        if not line:
            continue
        try:
            if (command := _command(line)) is not None:
                reply = _run_command(session, *command)
                if reply == "leave":
                    return
                if group.is_rank0:
                    mention(reply)
            else:
                _answer(session, group, _question(line))
        except RequestError as error:  # this question's fault
            if group.is_rank0:
                mention(f"quantkit: error: {as_options(str(error))}", err=True)


def _answer(session: ChatSession, group: ProcessGroup, question: str) -> None:
    try:
        with _interruptible() as interrupted:
            pieces = session.ask(question, interrupted=lambda: group.broadcast_from_rank0(interrupted()))
            interrupted()  # a Ctrl-C so far ends the answer, which begins now, at once
            for piece in pieces:
                if group.is_rank0:
                    click.echo(piece, nl=False)
    except KeyboardInterrupt:
        raise_if_interrupted()  # SIGTERM was not typed
        if group.size > 1:
            raise
        mention("quantkit: note: the question was stopped before its answer began, and is dropped", err=True)
        return
    if group.is_rank0:
        click.echo()
        if session.finish_reason == "length":
            mention("quantkit: note: the answer was cut off at the maximum number of tokens", err=True)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed. From its first call on, Ctrl-C raises nothing: a step
    that has begun is finished. Raises `KeyboardInterrupt` at once if Ctrl-C is pressed before, while the question is
    prepared."""
    pressed = polled = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        if not polled:
            raise KeyboardInterrupt

    def interrupted() -> bool:
        nonlocal polled
        polled = True
        return pressed

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, remember)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _questions(path: Path) -> Iterator[str]:
    """What is typed, line by line, until Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it logs tasks that a signal has ended
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # before they began
    words = WordCompleter(list(_COMMANDS), sentence=True)
    keys = KeyBindings()
    keys.add(Keys.Vt100MouseEvent, eager=True)(lambda event: None)  # not requested; a partial one fails
    prompts: PromptSession[str] = PromptSession("> ", completer=words, complete_while_typing=False, key_bindings=keys)
    mention(f"{path}: /help lists the commands, Ctrl-D exits")
    while True:
        try:
            yield prompts.prompt().strip()
        except EOFError:
            return
        except KeyboardInterrupt:  # clears the line
            raise_if_interrupted()  # SIGTERM was not
            if not prompts.default_buffer.text:
                mention("Ctrl-D exits.")


def _command(line: str) -> tuple[str, str] | None:
    """The command name that a line begins with, whether it exists or not, and the text after it."""
    found = _COMMAND.fullmatch(line)
    return None if found is None else (found[1].lower(), found[2] or "")


def _question(line: str) -> str:
    """The question in a line: two slashes before a word mean one, if one slash would make it a command."""
    return line[1:] if line.startswith("//") and _command(line[1:]) else line


def _run_command(session: ChatSession, name: str, text: str) -> str:
    """Run a command, and return the reply; ``leave`` ends the conversation. Raises `RequestError` if there is no such
    command, or it takes no argument."""
    if name == "/system":
        session.system = text or None
        return "The system prompt is set." if session.system else "There is no system prompt."
    if name not in (*_COMMANDS, *_LEAVE):
        raise RequestError(
            "no such command", found=name, expected=", ".join(_COMMANDS), hint=f"/{name} begins a question with {name}"
        )
    if text:
        raise RequestError(
            f"{name} takes no argument", found=shown(text), hint=f"/{name} begins a question with {name}"
        )
    if name == "/reset":
        session.reset()
        return "The conversation starts again."
    if name == "/help":
        return "\n".join(f"{command:<8} {about}" for command, about in (*_COMMANDS.items(), _ESCAPED))
    return "leave"
