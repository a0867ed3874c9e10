"""Checks of the arguments of public functions, before anything is done: Python itself checks no
types.

A string from JSON or from an environment variable must not count as a boolean or a number. Each
function raises `RequestError`, which names the argument.
"""

from __future__ import annotations

import errno
import numbers
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

from quantkit.base.json_values import format_value
from quantkit.errors import RequestError


def wrong_type(name: str, value: object, expected: str, *, hint: str | None = None) -> RequestError:
    """Return the error for an argument of the wrong type."""
    problem = f"`{name}` is of the wrong type"
    return RequestError(
        problem, found=format_value(value), expected=expected, hint=hint, argument=name
    )


def require_flags(**flags: object) -> None:
    """Require booleans: the string ``false`` would count as true, and None as false."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise wrong_type(name, value, "True or False")


def require_instance(
    name: str, value: object, kinds: type | tuple[type, ...], expected: str
) -> None:
    """Require an instance of a class; the error shows the type of what was found."""
    if not isinstance(value, kinds):
        problem = f"`{name}` is of the wrong type"
        raise RequestError(problem, found=type(value).__name__, expected=expected, argument=name)


def require_tokenizer(tokenizer: object) -> None:
    """Require a tokenizer, not a path or None."""
    if not hasattr(tokenizer, "vocab_size"):
        raise wrong_type("tokenizer", tokenizer, "the one that quantkit.load(path) returns")


def as_integer(name: str, value: object, minimum: int | None = None) -> int:
    """Return an integer, also numpy's, but not a boolean; of at least `minimum`, if there is
    one.
    """
    result = None
    if hasattr(value, "__index__") and not _is_boolean(value):
        # Arrays have the method whatever they hold.
        with suppress(TypeError):
            result = operator.index(value)
    if result is None:
        raise wrong_type(name, value, "an integer")
    if minimum is not None and result < minimum:
        raise RequestError(
            f"`{name}` must be at least {minimum}", found=format_value(result), argument=name
        )
    return result


def as_number(name: str, value: object) -> float:
    """Return an integer or a float, but not a boolean."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise RequestError(
            f"`{name}` is out of range", found=format_value(value), argument=name
        ) from error


def as_seed(name: str, value: object) -> int:
    """Return an integer that torch's generators accept: one of 64 bits."""
    result = as_integer(name, value)
    if not -(2**63) <= result < 2**64:
        raise RequestError(f"{name} does not fit 64 bits", found=result, argument=name)
    return result


def as_string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    return value


def as_strings(name: str, value: object) -> list[str]:
    """Return one string or several."""
    if isinstance(value, str):
        return [value]
    return [as_string(name, one) for one in _several(name, value, "a string")]


def as_path(name: str, value: object, *, hint: str | None = None) -> Path:
    """Return a path; an empty string, which would mean the current folder, and one too long for a
    path are refused.
    """
    if isinstance(value, str | os.PathLike):
        found = os.fspath(value)
    else:
        found = None
    if not isinstance(found, str):
        raise wrong_type(name, value, "a path", hint=hint)
    if not found:
        raise RequestError(f"`{name}` is empty", expected="a path")
    try:
        os.lstat(found)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise RequestError(
                f"`{name}` is too long for a path",
                found=format_value(found),
                expected="a path",
                hint=hint,
            ) from error
    return Path(found)


def as_paths(name: str, value: object, *, hint: str | None = None) -> list[Path]:
    """Return one path or several."""
    if isinstance(value, str | os.PathLike):
        return [as_path(name, value, hint=hint)]
    return [as_path(name, one, hint=hint) for one in _several(name, value, "a path")]


def _several(name: str, value: object, kind: str) -> Iterable[object]:
    if not is_several(value):
        raise wrong_type(name, value, f"{kind}, or several in a list")
    return value


def token_rows(value: object) -> list[list[int]]:
    """Token ids in a list or array, [T] or [B, T], as B rows. Raises `TypeError` for anything else,
    and for a collection without an order.
    """
    if hasattr(value, "tolist"):
        listed = value.tolist()
    else:
        listed = value
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise TypeError("not a list")
    if listed and all(isinstance(one, list | tuple) for one in listed):
        rows = listed
    else:
        rows = [listed]
    if any(_is_boolean(one) for row in rows for one in row):
        raise TypeError("booleans")
    result: list[list[int]] = []
    for row in rows:
        result.append([operator.index(one) for one in row])
    return result


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def is_several(value: object) -> TypeGuard[Iterable[object]]:
    """Return whether a value is a collection of values: bytes are numbers, and of a mapping only
    the keys would be used.
    """
    several = isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | Mapping)
    # An array without dimensions has `__iter__` too.
    return several and getattr(value, "ndim", 1) > 0
