"""The ``quantkit`` command: one-line errors, stable exit codes."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem, shell_complete

from quantkit.base.late import LateTable
from quantkit.base.messages import Message
from quantkit.cli.hints import command_scope, no_command, spell
from quantkit.cli.options import COMPLETION, Context, exit_codes
from quantkit.cli.output import drop_output, mention, report_interrupted, say, with_kept
from quantkit.cli.processes import INTERNAL_ERROR
from quantkit.cli.signals import get_interrupt_exit_code, interruptible
from quantkit.cli.streams import open_missing_streams
from quantkit.errors import DestinationError, QuantkitError
from quantkit.version import __version__


class _Entry(NamedTuple):
    """Where a command is defined, and its line in the list of commands."""

    module: str
    function: str
    about: str


# A command's module is imported when the command is looked up: the list of commands stays fast, and
# no command loads what only others need.
_ENTRIES = {
    "apply-delta": _Entry("refine", "apply_delta", "Apply what `quantkit refine --delta` wrote."),
    "bench": _Entry("measure", "bench", "Time models: prefill, decoding, loading, memory, cost."),
    "chat": _Entry("chat", "chat", "Chat with the instruct model in PATH."),
    "completion": _Entry(
        "options", "completion", "Print the script that completes quantkit in a shell."
    ),
    "convert": _Entry(
        "convert", "convert", "Write a model in another format, sharding or float type."
    ),
    "demo": _Entry("demo", "demo", "Try everything on a small model that ships with quantkit."),
    "doctor": _Entry("check", "doctor", "Check what is wrong with a model, whoever made it."),
    "eval": _Entry("measure", "evaluate", "Measure models: perplexity, divergence, tasks, speed."),
    "generate": _Entry(
        "generate", "generate", "Continue a prompt, or many, with the model in PATH."
    ),
    "imatrix": _Entry("quantize", "imatrix", "Measure the importance of inputs for llama.cpp."),
    "inspect": _Entry("check", "inspect", "Describe the model in PATH, from headers alone."),
    "plan": _Entry("plan", "plan", "Estimate the memory, disk and time of a command."),
    "push": _Entry("push", "push", "Send a model to a repository on the Hugging Face hub."),
    "quantize": _Entry("quantize", "quantize", "Quantize a model's linear layers to int8 or int4."),
    "refine": _Entry(
        "refine", "refine", "Train a quantized model's scales against its float model."
    ),
    "serve": _Entry("serve", "serve", "Serve the model in PATH with OpenAI's API."),
    "verify": _Entry("check", "verify", "Check if two models are the same, or how far apart."),
}


class _LateCommands(LateTable[click.Command]):
    """The commands by name; each is imported when it is first looked up."""

    def load(self, place: str) -> click.Command:
        # Its help names its own options, and it is imported while the group is the command.
        with no_command():
            return super().load(place)


class _Commands(click.Group):
    """Lists commands without importing them, and suggests ``generate`` for the name of that
    command in other tools.
    """

    context_class = Context

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The base class would import every command for its first sentence.
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.about) for name, entry in _ENTRIES.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        completions = []
        for name, entry in _ENTRIES.items():
            if name.startswith(incomplete):
                completions.append(CompletionItem(name, help=entry.about))
        # Those of the options; the class in between would import all commands.
        return completions + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] == "run":
            ctx.fail(f"No such command '{args[0]}'. Did you mean 'generate'?")
        return super().resolve_command(ctx, args)


def _store_verbose(context: click.Context, option: click.Parameter, requested: bool) -> None:
    """Keep the value of --verbose for the callback of --version."""
    # The option is eager, so click parses it before --version, wherever it is.
    context.meta[option.name or ""] = requested


def _show_version(context: click.Context, option: click.Parameter, requested: bool) -> None:
    """Print the version, with --verbose the environment too, and exit."""
    if context.meta["verbose"] and not requested:
        raise click.UsageError("--verbose requires --version", context)
    # click parses resiliently while a shell completes words, and wants no output then.
    if not requested or context.resilient_parsing:
        return
    if context.meta["verbose"]:
        from quantkit.cli.environment import environment_lines

        say(environment_lines(), wrap=False)
    else:
        click.echo(f"quantkit, version {__version__}")
    context.exit()


@click.group(
    cls=_Commands,
    commands=_LateCommands(
        {name: f"quantkit.cli.{entry.module}:{entry.function}" for name, entry in _ENTRIES.items()}
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=exit_codes(),
)
@click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    help="Show a traceback with an error; must come first.",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option(
    "--verbose",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_store_verbose,
    help="With --version: also show the machine, libraries and settings, for a bug report.",
)
def quantkit() -> None:
    """Convert, quantize, verify and run Llama-family language models."""


@command_scope()
def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    open_missing_streams()
    # click's own main, which is not called below, would do this.
    instruction = os.environ.get(COMPLETION)
    if instruction:
        sys.exit(shell_complete(quantkit, {}, "quantkit", COMPLETION, instruction))
    logging.getLogger("torch").setLevel(logging.ERROR)
    _show_log()
    if arguments is None:
        arguments = sys.argv[1:]
    debug = arguments[:1] == ["--debug"]
    try:
        # Not through click's own main, which treats EOFError as Ctrl-C, and a closed pipe as an
        # error.
        with interruptible(), quantkit.make_context("quantkit", list(arguments)) as context:
            code = quantkit.invoke(context)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        report_interrupted(error)
        code = get_interrupt_exit_code(error)
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(usage)
        mention(usage.getvalue().rstrip("\n"), err=True)
        code = error.exit_code
    except QuantkitError as error:
        if debug:
            traceback.print_exc()
        mention(f"quantkit: error: {with_kept(spell(error.message), error)}", err=True)
        code = error.exit_code
    except BrokenPipeError:
        # The reader, such as `head`, has read what it needs.
        drop_output()
        code = 0
    except OSError as error:
        if debug:
            raise
        # Without the name of a file it is an error of the output, such as a full disk. What is not
        # written yet must not raise again when Python exits.
        if error.filename is None:
            drop_output()
        mention(
            f"quantkit: error: {error.filename or 'the output'}: {error.strerror or error}",
            err=True,
        )
        code = DestinationError.exit_code
    except Exception as error:
        if debug:
            raise
        # One line, of a length that a terminal can show: messages of torch have many lines.
        text = " ".join(str(error).split())[:500]
        message = with_kept(f"{type(error).__name__}: {text}", error)
        mention(f"quantkit: internal error: {message}; --debug shows more", err=True)
        code = INTERNAL_ERROR
    sys.exit(code if isinstance(code, int) else 0)


def _show_log() -> None:
    """Print the library's log on stderr as notes and warnings."""
    log = logging.getLogger("quantkit")
    log.handlers = [_Notes()]
    # Else a program's root handlers, if an imported library has set some, print each line again.
    log.propagate = False
    log.setLevel(logging.INFO)


class _Notes(logging.Handler):
    """Prints a line on stderr for each record."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            label = "warning"
        else:
            label = "note"
        text = record.getMessage()
        # The library logs a `Message` as the only argument of "%s". Formatting it into a string
        # has lost its options, so the argument itself is spelled.
        if record.msg == "%s" and isinstance(record.args, tuple):
            argument = record.args[0]
            if isinstance(argument, Message):
                text = argument
        mention(f"quantkit: {label}: {spell(text)}", err=True)
