"""Spell the options that messages of the library name as the running command has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

from quantkit.base.messages import Message, Option

# Options whose name differs from the Python argument's: `for` is a keyword of Python, and the
# repeatable --text has the singular.
_RENAMED = {"runtime": "for", "texts": "text"}

# Arguments of Python that commands take without an option.
_POSITIONAL = ("path", "src", "dst")
# An option as Python spells it, such as `resume=True`.
_BACKQUOTED = re.compile(r"`([a-z]\w*)(?:=[^`]*)?`")

# The command that was parsed last. Errors are printed after click has left its context.
_command: click.Command | None = None


class UnknownOptionError(AssertionError):
    """A message names an option that the running command does not have."""


# Raise `UnknownOptionError` instead of printing such an option. The tests switch it on.
strict = False


def set_command(command: click.Command | None) -> None:
    """Remember the command for which messages are printed from now on; None forgets it."""
    global _command
    _command = command


@contextmanager
def no_command() -> Iterator[None]:
    """Spell options of no particular command meanwhile, as in the definition of another one."""
    global _command
    outer_command = _command
    _command = None
    try:
        yield
    finally:
        _command = outer_command


@contextmanager
def command_scope() -> Iterator[None]:
    """Forget the running command at the end: what a script does later concerns no command."""
    try:
        yield
    finally:
        set_command(None)


def spell(text: str) -> str:
    """Return a message of the library with the command line's spelling of its options.

    Raises:
        UnknownOptionError: if the text names an option of the command as Python spells it, while
            `strict` is set.
    """
    if isinstance(text, Message):
        text = text.render(spell_option)
    # JSON has the notes of results as Python spells them.
    if strict and _command is not None and not text.startswith("{"):
        for name in _BACKQUOTED.findall(text):
            if _find_parameter(_command, name) is not None:
                raise UnknownOptionError(f"{_command.name}: `{name}` is not an `Option`: {text}")
    return text


def spell_option(option: Option) -> str:
    """Spell an option as the running command has it.

    Raises:
        UnknownOptionError: if the command does not have it, while `strict` is set.
    """
    # An option of another command is not looked up in the running one.
    if option.job is not None:
        spelled = _spell(option)
        return f"{spelled} of quantkit {option.job}" if option.job else spelled
    if _command is None:
        return _spell(option)
    parameter = _find_parameter(_command, option.name)
    # Commands name the argument that is a path in their own ways.
    if parameter is None and strict and option.name not in _POSITIONAL:
        raise UnknownOptionError(f"{_command.name} has no option for {option}")
    return _spell(option, is_argument=isinstance(parameter, click.Argument))


def _spell(option: Option, *, is_argument: bool = False) -> str:
    """Spell an option by its name and value alone, whether the running command has it or not."""
    name = _RENAMED.get(option.name, option.name)
    if is_argument or option.name in _POSITIONAL:
        return name.upper()
    name = name.replace("_", "-")
    if option.metavar is not None:
        return f"--{name} {option.metavar}"
    if option.value is None or option.value is True:
        return f"--{name}"
    if option.value is False:
        return f"--no-{name}"
    return f"--{name} {option.value}"


def _find_parameter(command: click.Command, name: str) -> click.Parameter | None:
    """Find the parameter of a command that passes the Python argument of this name."""
    spelling = f"--{_RENAMED.get(name, name).replace('_', '-')}"
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        # A flag such as --source-check has the secondary name --no-source-check.
        if parameter.name == name or spelling in names or f"--no-{spelling[2:]}" in names:
            return parameter
    return None
