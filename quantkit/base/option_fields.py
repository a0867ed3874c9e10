"""Declare each option of a job once: as a field of a frozen dataclass, with what the command line
needs to know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from quantkit.base.arguments import as_string, require_flags
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError

P = ParamSpec("P")
Options = TypeVar("Options")
Result = TypeVar("Result")

IfExists = Literal["fail", "skip"]
"""What a job does if its output exists."""

OTHER = "Other options"
"""The last section of a help page."""
ADAPTERS = "Adapters"
"""The section of `lora`."""
ADAPTERS_HELP = (
    "Merge a LoRA adapter in PEFT's format into SRC; repeatable, each with its weight. Default:"
    " weight 1."
)
TEXT_HELP = (
    "A file, a saved dataset, or a hub dataset owner/name:config:split; or self, for text that the"
    " float model writes (a file of this name is ./self). Default: the included text."
)
COLUMN_HELP = (
    "Column or key with the text. Default: text, messages, conversations, or the only string"
    " column."
)
"""Of the text that samples are drawn from, and of what holds it in a dataset."""
# The key of an `OptionInfo` in the metadata of a dataclass's field.
_KEY = "option"


@dataclass(frozen=True)
class OptionInfo:
    """How the command line offers an option.

    Attributes:
        section: the title in the help under which it is listed.
        help: one line for the help; None for an option that several commands share under this name.
        kind: the type of its value, or the name of one of the command line's own types.
        metavar: the placeholder for the value in the help.
        choices: all possible values; empty if there are others.
        changes_result: whether another value may give another model.
    """

    section: str
    help: str | None
    kind: type | str
    metavar: str | None
    choices: tuple[str, ...]
    changes_result: bool


def option(
    section: str,
    help: str | None = None,
    kind: type | str = str,
    *,
    default: Any = None,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    changes_result: bool = True,
) -> Any:
    """Declare a field of a job's options; see `OptionInfo`."""
    info = OptionInfo(
        section=section,
        help=help,
        kind=kind,
        metavar=metavar,
        choices=choices,
        changes_result=changes_result,
    )
    return field(default=default, metadata={_KEY: info})


def require_valid(options: Any) -> None:
    """Raise a `RequestError` for a field of booleans with another value, and for an unknown
    value of `if_exists`.
    """
    flags: dict[str, object] = {}
    for option_field in fields(options):
        # Types are strings, as annotations are not evaluated in the modules that declare options.
        if option_field.type == "bool":
            flags[option_field.name] = getattr(options, option_field.name)
    require_flags(**flags)
    if_exists = as_string("if_exists", options.if_exists)
    choices = get_args(IfExists)
    if if_exists not in choices:
        raise RequestError(
            Message("unknown value of ", Option("if_exists")),
            found=if_exists,
            expected=" or ".join(choices),
        )


def find_option_fields(options: type) -> dict[str, OptionInfo]:
    """Find the fields that are options of the command line, by name, in order."""
    infos: dict[str, OptionInfo] = {}
    for option_field in fields(options):
        # Other fields can be passed from Python only.
        if _KEY in option_field.metadata:
            infos[option_field.name] = option_field.metadata[_KEY]
    return infos


def command_words(values: Mapping[str, object]) -> list[str]:
    """Spell options, by name, as words of a command line; None and False leave an option out."""
    words = list[str]()
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list | tuple):
            # An option that takes several values is repeated.
            for item in value:
                words += [option, item]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words


def accept_fields_of(
    options: Callable[P, Options],
) -> Callable[[Callable[[Options], Result]], Callable[P, Result]]:
    """Let a job, which takes one object of options, be called with their fields as arguments.

    Signature and help of the function are those of the fields; type checkers and editors know them
    too.
    """

    def decorate(job: Callable[[Options], Result]) -> Callable[P, Result]:
        @functools.wraps(job)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return job(options(*args, **kwargs))

        job_signature = inspect.signature(job)
        signature = inspect.signature(options)
        # `inspect` and `help` show this in place of the signature of `job`, one object of options.
        call.__signature__ = signature.replace(return_annotation=job_signature.return_annotation)  # type: ignore[attr-defined]
        # The job's docstring describes further arguments; those of the fields come first.
        call.__doc__ = (inspect.getdoc(job) or "").replace(
            "Args:\n", f"Args:\n{_collect_field_docs(options)}\n", 1
        )
        return call

    return decorate


def _collect_field_docs(options: Any) -> str:
    """Collect the descriptions of fields in the docstrings of a class of options and its bases."""
    descriptions: list[str] = []
    # In the order of the arguments: fields of a base precede those of a class derived from it.
    for base in reversed(options.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        if "Attributes:\n" in text:
            descriptions.append(text.partition("Attributes:\n")[2].rstrip())
    return "\n".join(descriptions)
