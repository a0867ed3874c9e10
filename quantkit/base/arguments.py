"""Check the arguments of public functions before any work begins: Python itself checks no types.

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
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError


def wrong_type(name: str, value: object, expected: str, *, hint: str | None = None) -> RequestError:
    """Build the error for an argument of the wrong type."""
    problem = Message(Option(name), " is of the wrong type")
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
    """Require an instance of a class; the error shows the type of the value, not the value."""
    if not isinstance(value, kinds):
        problem = Message(Option(name), " is of the wrong type")
        raise RequestError(problem, found=type(value).__name__, expected=expected, argument=name)


def require_tokenizer(tokenizer: object) -> None:
    """Require a tokenizer, not a path or None."""
    if not hasattr(tokenizer, "vocab_size"):
        raise wrong_type("tokenizer", tokenizer, "the one that quantkit.load(path) returns")


def as_integer(name: str, value: object, minimum: int | None = None) -> int:
    """Convert an integer, also numpy's, to `int`; refuse booleans and integers below `minimum`."""
    integer = None
    if hasattr(value, "__index__") and not _is_boolean(value):
        # Every array has `__index__`, and raises unless it holds a single integer.
        with suppress(TypeError):
            integer = operator.index(value)
    if integer is None:
        raise wrong_type(name, value, "an integer")
    if minimum is not None and integer < minimum:
        raise RequestError(
            Message(Option(name), f" must be at least {minimum}"),
            found=format_value(integer),
            argument=name,
        )
    return integer


def as_number(name: str, value: object) -> float:
    """Convert an integer or a float to `float`; refuse booleans."""
    # `bool` is a subclass of `int`, so it counts as a `Real`.
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise wrong_type(name, value, "a number")
    try:
        return float(value)
    # Python's integers have no upper limit, and floats end at 1.8e308.
    except OverflowError as error:
        raise RequestError(
            Message(Option(name), " is out of range"), found=format_value(value), argument=name
        ) from error


def as_seed(name: str, value: object) -> int:
    """Convert a seed to `int` and require that torch's generators accept it."""
    seed = as_integer(name, value)
    # torch reads a seed as a signed or as an unsigned integer of 64 bits.
    if not -(2**63) <= seed < 2**64:
        raise RequestError(f"{name} does not fit in 64 bits", found=seed, argument=name)
    return seed


def as_string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    return value


def as_strings(name: str, value: object) -> list[str]:
    """Convert one string, or a collection of them, to a list."""
    # A string is itself a collection of strings.
    if isinstance(value, str):
        return [value]
    items = _require_several(name, value, "a string")
    return [as_string(name, item) for item in items]


def as_path(name: str, value: object, *, hint: str | None = None) -> Path:
    """Convert a string or path-like object to a `Path`; refuse an empty one, which would mean the
    current folder, and one that is too long for the system.
    """
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
    else:
        text = None
    # `os.fspath` may also return bytes.
    if not isinstance(text, str):
        raise wrong_type(name, value, "a path", hint=hint)
    if not text:
        raise RequestError(Message(Option(name), " is empty"), expected="a path")
    try:
        os.lstat(text)
    except OSError as error:
        # A path that does not exist is valid here: it may name an output.
        if error.errno == errno.ENAMETOOLONG:
            raise RequestError(
                Message(Option(name), " is too long for a path"),
                found=format_value(text),
                expected="a path",
                hint=hint,
            ) from error
    return Path(text)


def as_paths(name: str, value: object, *, hint: str | None = None) -> list[Path]:
    """Convert one path, or a collection of them, to a list."""
    if isinstance(value, str | os.PathLike):
        return [as_path(name, value, hint=hint)]
    items = _require_several(name, value, "a path")
    return [as_path(name, item, hint=hint) for item in items]


def _require_several(name: str, value: object, kind: str) -> Iterable[object]:
    if not is_several(value):
        raise wrong_type(name, value, f"{kind}, or several in a list")
    return value


def as_token_rows(value: object) -> list[list[int]]:
    """Convert token ids in a list or array, [T] or [B, T], to B rows. Raises `TypeError` for
    anything else, and for a collection without an order.
    """
    if hasattr(value, "tolist"):
        listed = value.tolist()
    else:
        listed = value
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise TypeError("not a list")
    if listed and all(isinstance(item, list | tuple) for item in listed):
        rows = listed
    else:
        rows = [listed]
    for row in rows:
        # `operator.index` would read True as token 1.
        if any(_is_boolean(token) for token in row):
            raise TypeError("booleans")
    token_ids: list[list[int]] = []
    for row in rows:
        token_ids.append([operator.index(token) for token in row])
    return token_ids


def _is_boolean(value: object) -> bool:
    # Booleans of numpy, torch and JAX are recognized by their dtype, without an import of these.
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def is_several(value: object) -> TypeGuard[Iterable[object]]:
    """Return whether a value is a collection of arguments. Bytes would give numbers, and a mapping
    only its keys, so neither counts.
    """
    several = isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | Mapping)
    # An array without dimensions has `__iter__` too, which raises.
    return several and getattr(value, "ndim", 1) > 0
