"""Errors that name the place and the field of a request, as its user wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quantkit.base.messages import Message
from quantkit.errors import CheckpointError, RequestError

_WORD = re.compile(r"\w+")
_NO_NAMES: Mapping[str, str] = {}


@contextmanager
def restate_errors(
    place: str | None = None, *, names: Mapping[str, str] = _NO_NAMES
) -> Iterator[None]:
    """Let errors name their place in a file, and fields as the file spells and calls them.

    Args:
        place: the file and the line; None for a request that is in no file.
        names: the fields by the names of the arguments, where these differ.
    """
    try:
        yield
    except (RequestError, CheckpointError) as error:
        path = error.path if place is None else place
        # An error may concern a file of the model, which the problem then names.
        if error.path in (None, path):
            problem = error.problem
        else:
            problem = Message(f"{error.path}: ", error.problem)
        texts: dict[str, Any] = {"problem": problem, "expected": error.expected, "hint": error.hint}
        for key, text in texts.items():
            if isinstance(text, str):
                texts[key] = _spell_as_in_file(text, names)
        if error.argument is None:
            argument = None
        else:
            argument = names.get(error.argument, error.argument)
        raise error.restate(**texts, path=path, argument=argument) from error


@contextmanager
def name_argument_in_errors(argument: str, number: int | None = None) -> Iterator[None]:
    """Let errors name the argument that they concern, unless they name one already.

    Args:
        number: the place of the value among several ones of the argument, which the message then
            names.
    """
    try:
        yield
    except (RequestError, CheckpointError) as error:
        if error.argument not in (None, argument):
            raise
        problem = error.problem
        if number is not None:
            problem = Message(f"{argument} {number}: ", problem.removeprefix("the prompt "))
        raise error.restate(problem=problem, argument=argument) from error


def _spell_as_in_file(text: str, names: Mapping[str, str]) -> str:
    """Quote arguments in a message as keys, and replace words by what the file calls them."""
    if isinstance(text, Message):
        text = text.render(lambda option: f"'{option.name}'")
    return _WORD.sub(lambda word: names.get(word[0], word[0]), text)
