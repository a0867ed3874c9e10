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

from quantkit.base.json_values import LINES_OF_ARRAY, MAX_DEPTH, depth, format_value, within
from quantkit.errors import CheckpointError, RequestError

EXPECTED = '{"prompt": "..."} or {"messages": [...]}'
_SPELLED = re.compile(r"`(\w+)`")
_WORD = re.compile(r"\w+")
_MAX_DIGITS = 4000  # of an integer: Python spells at most 4300
_NO_NAMES: Mapping[str, str] = {}


def objects(content: bytes, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file, by numbers of their lines; blank lines at the end are none.
    Raises `RequestError` if it is empty, not text, or of another kind.
    """
    try:
        text = content.decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise RequestError(
            "cannot be decoded", path=f"{name}:{number}", expected="UTF-8"
        ) from error
    if not text:
        raise RequestError("the file is empty", path=name, expected=f"on each line {EXPECTED}")
    for number, line in enumerate(text.split("\n"), 1):
        yield number, strict_object(line, f"{name}:{number}", first=number == 1)


def strict_object(line: str, place: str | None, *, first: bool = False) -> dict[str, Any]:
    if not line.strip():
        raise RequestError("the line is empty", path=place, expected=EXPECTED)
    value: Any = None
    with suppress(ValueError, RecursionError), at_place(place):
        value = json.loads(
            line, parse_constant=_refuse, parse_int=_integer, object_pairs_hook=_object_of
        )
    if isinstance(value, dict):
        with at_place(place):
            _require_exact(value, line)
        return value
    if first and line.lstrip().startswith("["):
        raise RequestError(
            "holds a JSON array",
            path=place,
            expected=f"on each line {EXPECTED}",
            hint=LINES_OF_ARRAY,
        )
    raise RequestError(
        "is no JSON object", path=place, found=format_value(line.strip()), expected=EXPECTED
    )


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (twice := find_duplicate([key for key, _ in pairs])) is not None:
        raise RequestError(f"the key {format_value(twice)} is there twice", argument=twice)
    return dict(pairs)


def find_duplicate(keys: list[Any]) -> Any:
    """Return one that is among them twice; None if none is."""
    return next((key for key, times in Counter(keys).items() if times > 1), None)


def _integer(text: str) -> float:
    if len(text) > _MAX_DIGITS:
        return math.inf
    return int(text)


class _Spelled(str):
    """A number with a point or an exponent, as it stands in the file."""


def _require_exact(values: Mapping[str, Any], line: str) -> None:
    """Raise a `RequestError` if a value is nested too deep, or a number is not what it was in
    the line.
    """
    for key, value in values.items():
        if depth(value) > MAX_DEPTH:
            raise RequestError(
                f"{format_value(key)} holds lists or objects in one another",
                expected=f"at most {MAX_DEPTH} deep",
                argument=key,
            )
        if any(isinstance(one, float) and not math.isfinite(one) for one in within(value)):
            raise RequestError(
                f"{format_value(key)} holds a number that is too large",
                expected="at most 1.79e308",
                argument=key,
            )
    if not any(isinstance(one, float) for one in within(values.get("id"))):
        return
    for one in within(json.loads(line, parse_float=_Spelled)["id"]):
        if isinstance(one, _Spelled) and not _comes_back(one):
            raise RequestError(
                "'id' holds a number that does not come back as it is",
                found=format_value(str(one)),
                expected=f"{float(one)}, or a string",
            )


def _comes_back(text: str) -> bool:
    """Return whether a finite number is the same when written again."""
    try:
        return Decimal(repr(float(text))) == Decimal(text)
    except InvalidOperation:  # exponents beyond all bounds
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


@contextmanager
def at_place(place: str | None, names: Mapping[str, str] = _NO_NAMES) -> Iterator[None]:
    """Report errors at their place in the file: keys, which are arguments elsewhere, as the file
    spells and calls them.
    """
    try:
        yield
    except (RequestError, CheckpointError) as error:
        path = error.path if place is None else place
        if error.path in (None, path):
            problem = error.problem
        else:
            problem = f"{error.path}: {error.problem}"
        texts: dict[str, Any] = {"problem": problem, "expected": error.expected, "hint": error.hint}
        spelled = {
            key: _WORD.sub(lambda word: names.get(word[0], word[0]), _SPELLED.sub(r"'\1'", text))
            if isinstance(text, str)
            else text
            for key, text in texts.items()
        }
        if error.argument is None:
            argument = None
        else:
            argument = names.get(error.argument, error.argument)
        raise error.restate(**spelled, path=path, argument=argument) from error


@contextmanager
def concerning(argument: str, number: int | None = None) -> Iterator[None]:
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
            problem = f"{argument} {number}: {problem.removeprefix('the prompt ')}"
        raise error.restate(problem=problem, argument=argument) from error
