"""The ``quantkit`` command: one-line errors, stable exit codes."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback

import click
from click.shell_completion import shell_complete

from quantkit.base.messages import Message
from quantkit.cli.chat import chat
from quantkit.cli.commands import convert, demo, doctor, imatrix, inspect, push, quantize, verify
from quantkit.cli.generate import generate
from quantkit.cli.hints import command_scope, spell
from quantkit.cli.measure import bench, evaluate
from quantkit.cli.options import COMPLETION, Context, add_threads, completion, exit_codes
from quantkit.cli.output import drop_output, mention, report_interrupted, say, with_kept
from quantkit.cli.plan import plan
from quantkit.cli.processes import INTERNAL_ERROR
from quantkit.cli.refine import apply_delta, refine
from quantkit.cli.serve import serve
from quantkit.cli.signals import get_interrupt_exit_code, interruptible
from quantkit.cli.streams import open_missing_streams
from quantkit.errors import DestinationError, QuantkitError
from quantkit.version import __version__


class _Commands(click.Group):
    """Suggests ``generate`` for the name of that command in other tools."""

    context_class = Context

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


_JOBS = (
    demo,
    inspect,
    doctor,
    convert,
    quantize,
    refine,
    imatrix,
    verify,
    evaluate,
    generate,
    chat,
    serve,
    bench,
)
add_threads(*_JOBS, plan.commands["generate"], plan.commands["refine"])
for command in (*_JOBS, apply_delta, plan, push, completion):
    quantkit.add_command(command)


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
