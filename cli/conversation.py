"""A conversation on a terminal or in a pipe, whatever answers the questions."""

from __future__ import annotations

import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TypeVar

import click

from quantkit.base.json_values import format_value
from quantkit.cli.hints import spell
from quantkit.cli.output import mention, note, print_generated
from quantkit.cli.signals import raise_if_interrupted
from quantkit.errors import RequestError

_COMMANDS = {
    "/system": "set the system prompt to the text after it, or to none",
    "/reset": "start a new conversation",
    "/help": "show this list",
    "/exit": "exit, as Ctrl-D does",
}
_ESCAPED = "//word", "a question that begins with /word"
# Other chat programs call it /quit or /bye.
_LEAVE = ("/exit", "/quit", "/bye")
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.IGNORECASE | re.DOTALL)

_STOPPED = "quantkit: note: the question was stopped before its answer began, and is dropped"

T = TypeVar("T")


class Answerer(Protocol):
    """Answers questions: a `ChatSession`, or another class with its methods."""

    system: str | None

    @property
    def finish_reason(self) -> str | None: ...

    def ask(
        self, text: str, *, interrupted: Callable[[], bool] | None = None
    ) -> Generator[str, None, None]: ...

    def reset(self) -> None: ...


class Group(Protocol):
    """The processes that answer together: a `ProcessGroup`, or another class with its methods."""

    @property
    def size(self) -> int: ...

    @property
    def is_rank0(self) -> bool: ...

    def broadcast_from_rank0(self, value: T) -> T: ...


class Alone:
    """A `Group` of one process."""

    size = 1
    is_rank0 = True

    def broadcast_from_rank0(self, value: T) -> T:
        """Return the value of the only process."""
        return value


def converse(
    session: Answerer,
    group: Group,
    name: str,
    statistics: Callable[[], object | None] = lambda: None,
) -> None:
    """Answer what is typed or piped, until it ends.

    Args:
        name: of the model, at the beginning on a terminal.
        statistics: about the last answer, if there are any; shown on a terminal.
    """
    # Only rank 0 reads and prints, and all processes must take the same path.
    on_terminal = group.broadcast_from_rank0(sys.stdin.isatty() and sys.stdout.isatty())
    if on_terminal:
        _answer_on_terminal(session, group, name, statistics)
    else:
        _answer_lines(session, group)


def _answer_lines(session: Answerer, group: Group) -> None:
    """Answer each line of stdin, and print only the answers."""
    if group.is_rank0:
        lines = _read_lines()
    else:
        lines = iter(())
    while (line := group.broadcast_from_rank0(next(lines, None))) is not None:
        command = _parse_command(line)
        if command is not None:
            name, text = command
            # Piped lines may be any text, so one that begins with an unknown command is a question.
            if name in (*_COMMANDS, *_LEAVE):
                if _run_command(session, name, text) == "leave":
                    return
                continue
            note(
                f"{name} is not a command, so the line is sent as a question; //{name[1:]}"
                " makes that explicit"
            )
        for piece in session.ask(_unescape_question(line)):
            raise_if_interrupted()
            if group.is_rank0:
                print_generated(piece)
        if group.is_rank0:
            click.echo()


def _read_lines() -> Iterator[str]:
    """Yield the lines of stdin that are not empty. Raises `RequestError` if one is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise RequestError(
                "the question cannot be decoded", path="-", found=f"line {number}", expected="UTF-8"
            ) from error
        if text:
            yield text


def _answer_on_terminal(
    session: Answerer, group: Group, name: str, statistics: Callable[[], object | None]
) -> None:
    """Answer questions on a terminal, and run commands, until one of them or Ctrl-D ends it."""
    if group.is_rank0:
        questions = _prompt_questions(name)
    else:
        questions = iter(())
    while (line := group.broadcast_from_rank0(next(questions, None))) is not None:
        if not line:
            continue
        try:
            command = _parse_command(line)
            if command is not None:
                reply = _run_command(session, *command)
                if reply == "leave":
                    return
                if group.is_rank0:
                    mention(reply)
            else:
                _answer(session, group, _unescape_question(line))
                if group.is_rank0:
                    answer_statistics = statistics()
                    if answer_statistics is not None:
                        mention(f"quantkit: note: {answer_statistics}", err=True)
        except RequestError as error:
            # Only this question failed, such as one that is too long. The conversation continues.
            if group.is_rank0:
                mention(f"quantkit: error: {spell(error.message)}", err=True)


def _answer(session: Answerer, group: Group, question: str) -> None:
    """Print the answer to a question. Ctrl-C stops it and keeps the part so far."""
    has_text = False
    try:
        with _interruptible() as interrupted:
            pieces = session.ask(
                question, interrupted=lambda: group.broadcast_from_rank0(interrupted())
            )
            # From this first call on, Ctrl-C no longer raises. The first step of the answer polls
            # again, and ends the answer if Ctrl-C was pressed between the two.
            interrupted()
            for piece in pieces:
                has_text = True
                if group.is_rank0:
                    print_generated(piece)
    except KeyboardInterrupt:
        # SIGTERM also raises KeyboardInterrupt. It ends the program, not only the answer.
        raise_if_interrupted()
        # The launcher gets Ctrl-C too, and ends the other processes.
        if group.size > 1:
            raise
        mention(_STOPPED, err=True)
        return
    # The session drops a question whose answer has neither text nor an end.
    if not has_text and session.finish_reason is None:
        if group.is_rank0:
            mention(_STOPPED, err=True)
        return
    if group.is_rank0:
        click.echo()
        if session.finish_reason == "length":
            mention(
                "quantkit: note: the answer was cut off at the maximum number of tokens", err=True
            )


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. From its first call on, Ctrl-C
    raises nothing: the model finishes the current step. Before that call, while the question is
    prepared, Ctrl-C raises `KeyboardInterrupt` at once.
    """
    pressed = polled = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        if not polled:
            raise KeyboardInterrupt

    def poll_interrupt() -> bool:
        nonlocal polled
        polled = True
        return pressed

    previous_handler = signal.getsignal(signal.SIGINT)
    # A process in the background of a script ignores Ctrl-C, and continues to do so.
    if previous_handler is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, remember)
    try:
        yield poll_interrupt
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _prompt_questions(name: str) -> Iterator[str]:
    """Yield what is typed, line by line, until Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    # asyncio, which prompt_toolkit uses, logs tasks that a signal ended.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # Python warns about tasks that a signal ended before they began.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    words = WordCompleter(list(_COMMANDS), sentence=True)
    keys = KeyBindings()
    # The prompt does not ask for mouse events. If they come anyway, prompt_toolkit fails on a
    # partial one.
    keys.add(Keys.Vt100MouseEvent, eager=True)(lambda event: None)
    prompts: PromptSession[str] = PromptSession(
        "> ", completer=words, complete_while_typing=False, key_bindings=keys
    )
    mention(f"{name}: /help lists the commands, Ctrl-D exits")
    while True:
        try:
            yield prompts.prompt().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            # Ctrl-C only clears the line, but SIGTERM ends the program.
            raise_if_interrupted()
            if not prompts.default_buffer.text:
                mention("Ctrl-D exits.")


def _parse_command(line: str) -> tuple[str, str] | None:
    """Split a line into the command name at its beginning, whether such a command exists or not,
    and the text after it. None if the line does not begin with one.
    """
    match = _COMMAND.fullmatch(line)
    if match is None:
        return None
    return match[1].lower(), match[2] or ""


def _unescape_question(line: str) -> str:
    """Remove the first of two slashes from a line that would be a command with one slash."""
    if line.startswith("//") and _parse_command(line[1:]):
        return line[1:]
    return line


def _run_command(session: Answerer, name: str, text: str) -> str:
    """Run a command, and return the reply; ``leave`` ends the conversation. Raises `RequestError`
    if there is no such command, or it takes no argument.
    """
    if name == "/system":
        session.system = text or None
        if session.system:
            return "The system prompt is set."
        return "There is no system prompt."
    if name not in (*_COMMANDS, *_LEAVE):
        raise RequestError(
            "unknown command",
            found=name,
            expected=", ".join(_COMMANDS),
            hint=f"/{name} begins a question with {name}",
        )
    if text:
        raise RequestError(
            f"{name} takes no argument",
            found=format_value(text),
            hint=f"/{name} begins a question with {name}",
        )
    if name == "/reset":
        session.reset()
        return "The conversation starts again."
    if name == "/help":
        lines = []
        for command, description in (*_COMMANDS.items(), _ESCAPED):
            lines.append(f"{command:<8} {description}")
        return "\n".join(lines)
    return "leave"
