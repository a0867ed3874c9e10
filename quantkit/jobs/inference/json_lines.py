"""JSON objects on lines, or alone, read without losing anything: keys that are there twice, numbers
that would not come back and deep nesting are errors.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from quantkit.base.json_values import (
    LINES_OF_ARRAY,
    MAX_DEPTH,
    collect_values,
    format_value,
    measure_depth,
)
from quantkit.base.messages import Message
from quantkit.errors import CheckpointError, RequestError

EXPECTED = '{"prompt": "..."} or {"messages": [...]}'
_WORD = re.compile(r"\w+")
# Of an integer: Python raises an error when it spells more than 4300.
_MAX_DIGITS = 4000
_NO_NAMES: Mapping[str, str] = {}


def parse_objects(content: bytes, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parse the objects of a file, and yield each with the number of its line, but for blank lines
    at the end. Raises `RequestError` if it is empty, not text, or of another kind.
    """
    try:
        # Editors on Windows write a byte order mark.
        text = content.decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise RequestError(
            "cannot be decoded", path=f"{name}:{number}", expected="UTF-8"
        ) from error
    if not text:
        raise RequestError("the file is empty", path=name, expected=f"on each line {EXPECTED}")
    # Not `splitlines`, which also splits at U+2028 and others that JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        yield number, parse_strict_object(line, f"{name}:{number}", first=number == 1)


def parse_strict_object(line: str, place: str | None, *, first: bool = False) -> dict[str, Any]:
    if not line.strip():
        raise RequestError("the line is empty", path=place, expected=EXPECTED)
    value: Any = None
    # Invalid JSON leaves None, for which the error below names what is expected.
    with suppress(ValueError, RecursionError), report_errors_at(place):
        value = json.loads(
            line, parse_constant=_refuse, parse_int=_integer, object_pairs_hook=_object_of
        )
    if isinstance(value, dict):
        with report_errors_at(place):
            _require_exact(value, line)
        return value
    if first and line.lstrip().startswith("["):
        raise RequestError(
            "contains a JSON array",
            path=place,
            expected=f"on each line {EXPECTED}",
            hint=LINES_OF_ARRAY,
        )
    raise RequestError(
        "is not a JSON object", path=place, found=format_value(line.strip()), expected=EXPECTED
    )


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    duplicate = find_duplicate([key for key, _ in pairs])
    if duplicate is not None:
        raise RequestError(f"the key {format_value(duplicate)} occurs twice", argument=duplicate)
    return dict(pairs)


def find_duplicate(keys: list[Any]) -> Any:
    """Find the first key that occurs more than once; None if all differ."""
    for key, times in Counter(keys).items():
        if times > 1:
            return key
    return None


def _integer(text: str) -> float:
    if len(text) > _MAX_DIGITS:
        # `_require_exact` reports it, with its key.
        return math.inf
    return int(text)


class _Spelled(str):
    """A number with a point or an exponent, as it stands in the file."""


def _require_exact(values: Mapping[str, Any], line: str) -> None:
    """Raise a `RequestError` if a value is nested too deep, or a number is not what it was in
    the line.
    """
    for key, value in values.items():
        if measure_depth(value) > MAX_DEPTH:
            raise RequestError(
                f"{format_value(key)} is nested too deeply",
                expected=f"at most {MAX_DEPTH} levels",
                argument=key,
            )
        for item in collect_values(value):
            # Python reads larger numbers as infinity, without an error.
            if isinstance(item, float) and not math.isfinite(item):
                raise RequestError(
                    f"{format_value(key)} contains a number that is too large",
                    expected="at most 1.79e308",
                    argument=key,
                )
    # Only the id is written again. The line is parsed a second time only if its id has a float.
    if not any(isinstance(item, float) for item in collect_values(values.get("id"))):
        return
    spelled_id = json.loads(line, parse_float=_Spelled)["id"]
    for item in collect_values(spelled_id):
        if isinstance(item, _Spelled) and not _comes_back(item):
            raise RequestError(
                "'id': the number loses precision in JSON",
                found=format_value(str(item)),
                expected=f"{float(item)}, or a string",
            )


def _comes_back(text: str) -> bool:
    """Compare a finite number, read and written again, with its spelling."""
    try:
        return Decimal(repr(float(text))) == Decimal(text)
    except InvalidOperation:
        # `Decimal` refuses exponents beyond its bounds, which `float` reads as 0.
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _spell_as_in_file(text: str, names: Mapping[str, str]) -> str:
    """Quote arguments in a message as keys, and replace words by what the file calls them."""
    if isinstance(text, Message):
        text = text.render(lambda option: f"'{option.name}'")
    return _WORD.sub(lambda word: names.get(word[0], word[0]), text)


@contextmanager
def report_errors_at(place: str | None, names: Mapping[str, str] = _NO_NAMES) -> Iterator[None]:
    """Report errors at their place in the file: keys, which are arguments elsewhere, as the file
    spells and calls them.
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
