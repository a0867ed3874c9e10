"""How help pages look: options in sections, exit codes at the end; and completion in shells.

click's own formatter writes the sections; it has no way to say which option belongs to which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import get_completion_class, shell_complete

from quantkit import errors
from quantkit.jobs.option_fields import OTHER

COMPLETION = "_QUANTKIT_COMPLETE"
"""The environment variable with which a shell requests completions."""

SHELLS = ("bash", "zsh", "fish")

BROKEN = 12
"""The exit code of `quantkit doctor` if something would break."""

EXIT_CODES: dict[int, str] = {
    0: "done",
    errors.QuantkitError.exit_code: "a bug in quantkit",
    errors.RequestError.exit_code: "a request that makes no sense",
    errors.CheckpointError.exit_code: "the source is damaged or incomplete",
    errors.UnsupportedError.exit_code: "the source is of a kind that is not supported",
    errors.DestinationError.exit_code: "the destination cannot be written",
    errors.ResumeError.exit_code: "an interrupted or running job is in the way",
    errors.NonFiniteError.exit_code: "weights or logits are NaN or Inf",
    errors.QualityError.exit_code: "the result is too far from its source",
    errors.GroupError.exit_code: "processes of one job differ, or one is lost",
    10: "verify: within the bound of the scheme",
    11: "verify: different",
    BROKEN: "doctor: something would break",
    130: "Ctrl-C",
    143: "ended by SIGTERM",
}

RUN = "How it runs"

Decorator = Callable[[Any], Any]
"""Adds options to a command."""
_sections: dict[click.Parameter, str] = {}


def section(title: str, *options: Decorator) -> Decorator:
    """Options that stand together in the help, under a title."""

    def decorated(command: Any) -> Any:
        for option in reversed(options):
            before = len(getattr(command, "__click_params__", ()))
            command = option(command)
            _sections.update(dict.fromkeys(command.__click_params__[before:], title))
        return command

    return decorated


class Command(click.Command):
    """A command whose help shows options in sections; those without a title stand at the end."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(_sections.get(parameter, OTHER), []).append(record)
        others = groups.pop(OTHER)  # --help is one of them
        groups[OTHER if groups else "Options"] = others
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def exit_codes(*codes: int) -> str:
    """The end of a help page: the meaning of these exit codes, or of all if none are given."""
    chosen = codes or EXIT_CODES
    return "\n".join(["\b", "Exit codes:", *(f"  {code:>3}  {EXIT_CODES[code]}" for code in chosen)])


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes quantkit in a shell.

    \b
    bash: eval "$(quantkit completion bash)" in ~/.bashrc
    zsh:  eval "$(quantkit completion zsh)" in ~/.zshrc
    fish: quantkit completion fish > ~/.config/fish/completions/quantkit.fish
    """
    root = context.find_root().command
    completion_class = get_completion_class(shell)
    assert completion_class is not None  # `SHELLS` are click's own
    click.echo(completion_class(root, {}, "quantkit", COMPLETION).source())


def complete(group: click.Group, instruction: str) -> int:
    """Print completions for a shell; returns the exit code."""
    return shell_complete(group, {}, "quantkit", COMPLETION, instruction)
