"""JSON from files, read strictly: a value has the requested type and range, or the file is
refused.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from quantkit.errors import CheckpointError

# The largest tokenizers published take some 30 MB, the largest indices 10.
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 64  # of nested lists and objects
LFS_POINTER = b"version https://git-lfs.github.com/spec"
"""The first bytes of what git checks out in place of a large file that it has not downloaded."""
LINES_OF_ARRAY = "jq -c '.[]' makes lines of it"
"""The hint for an array where a file needs JSON lines."""
_SHOWN = 60
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `CheckpointError` if the file is missing, empty, not JSON, too
    large or too deep, or not an object.
    """
    try:
        require_plain_file(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot be read: {error}", path=path) from error
    return parse_object(text, path)


def parse_object(text: str, path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file's text. Raises `CheckpointError` if it is empty, not JSON,
    too deep, or not an object.
    """
    if not text.strip():
        raise CheckpointError("the file is empty", path=path, expected="a JSON object")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise CheckpointError("does not hold a JSON object", path=path, found=type(value).__name__)
    if depth(value) > MAX_DEPTH:
        raise CheckpointError(
            "holds lists or objects nested too deep",
            path=path,
            expected=f"at most {MAX_DEPTH} deep",
        )
    return value


def require_json(path: Path) -> None:
    """Raise `CheckpointError` if a file does not hold JSON, of whatever type."""
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", path=path) from error


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON object whose numbers are all finite: a model's config, parts of which are written
    again. Raises `CheckpointError` as `read_json` does; also for NaN and Infinity, which JSON does
    not have, and for numbers that are infinite as floats.
    """
    value = read_json(path)
    for key, one in value.items():
        if any(isinstance(inner, float) and not math.isfinite(inner) for inner in within(one)):
            raise CheckpointError(
                f"'{key}' holds a number that is not finite",
                path=path,
                found=format_value(one),
                expected="JSON's numbers",
            )
    return value


def require_plain_file(path: Path) -> None:
    """Require a regular file of moderate size before it is read: a pipe would never end.

    Raises:
        CheckpointError: if it is missing, not a regular file, too large, or a git-lfs pointer to a
            file.
        OSError: if it cannot be read.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError("the file is missing", path=path) from None
    if not path.is_file():
        raise CheckpointError("is not a regular file", path=path)
    if size > MAX_BYTES:
        raise CheckpointError(
            "is too large", path=path, found=f"{size} bytes", expected=f"at most {MAX_BYTES}"
        )
    with path.open("rb") as file:
        begin = file.read(len(LFS_POINTER))
    if begin == LFS_POINTER:
        raise CheckpointError(
            "is a git-lfs pointer, not the file",
            path=path,
            found=f"{size} bytes",
            hint="run 'git lfs pull'",
        )


class Settings:
    """An object of a JSON file, read key by key with the expected type; null counts as absent.

    Every method raises `CheckpointError`, with the file and the key, for a value of another type or
    range.
    """

    def __init__(self, values: Mapping[str, Any], path: object, name: str = "") -> None:
        """`name` is the object's key in the file; empty for the whole file."""
        self.values = values
        self.path = str(path)
        self.name = name

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def need(self, key: str, hint: str | None = None) -> Any:
        """Return the value of a key that must exist, of any type."""
        if not self.has(key):
            within = f"{self.name} " if self.name else ""
            raise CheckpointError(f"{within}lacks the key '{key}'", path=self.path, hint=hint)
        return self.values[key]

    def integer(self, key: str, low: int, high: int) -> int:
        """Return an integer; floats, strings and booleans are refused."""
        value = self.need(key)
        expected = f"an integer from {low} to {high}"
        if type(value) is not int:
            self.wrong_type(key, expected)
        if not low <= value <= high:
            self._out_of_range(key, expected)
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """Return an integer or a float."""
        value = self.need(key)
        expected = f"a number from {low:g} to {high:g}"
        if type(value) not in (int, float):
            self.wrong_type(key, expected)
        if not low <= value <= high:  # NaN is not
            self._out_of_range(key, expected)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; `default` if the key is absent."""
        if not self.has(key):
            return default
        value = self.values[key]
        if not isinstance(value, bool):
            self.wrong_type(key, "true or false")
        return value

    def string(self, key: str, hint: str | None = None) -> str:
        value = self.need(key, hint)
        if not isinstance(value, str):
            self.wrong_type(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """Return a list of strings."""
        value = self.need(key)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.wrong_type(key, "a list of strings")
        return value

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        """Return a list of numbers."""
        value = self.need(key)
        if not isinstance(value, list) or not all(type(one) in (int, float) for one in value):
            self.wrong_type(key, "a list of numbers")
        if not all(low <= one <= high for one in value):
            self._out_of_range(key, f"numbers from {low:g} to {high:g}")
        return tuple(float(one) for one in value)

    def integers(self, key: str, low: int, high: int) -> list[int]:
        """Return a list of integers; floats, strings and booleans are refused."""
        values = self.need(key)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            self.wrong_type(key, "a list of integers")
        if not all(low <= value <= high for value in values):
            self._out_of_range(key, f"integers from {low} to {high}")
        return values

    def objects(self, key: str) -> list[Settings]:
        """Return a list of objects; empty if the key is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self.wrong_type(key, "a list of objects")
        objects: list[Settings] = []
        for index, one in enumerate(value):
            objects.append(Settings(one, self.path, f"{self._full(key)}[{index}]"))
        return objects

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none."""
        value = self.values.get(key)
        if value is None:
            ids = []
        elif isinstance(value, list):
            ids = value
        else:
            ids = [value]
        if not all(type(one) is int and one >= 0 for one in ids):
            self.wrong_type(key, "a token id, or a list of them")
        return tuple(ids)

    def inside(self, key: str) -> Settings:
        """Return an object within this one."""
        value = self.need(key)
        if not isinstance(value, dict):
            self.wrong_type(key, "an object")
        return Settings(value, self.path, self._full(key))

    def wrong_type(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"holds a value of the wrong type for '{self._full(key)}'",
            path=self.path,
            found=format_value(self.values[key]),
            expected=expected,
        )

    def _out_of_range(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"'{self._full(key)}' is out of range",
            path=self.path,
            found=format_value(self.values[key]),
            expected=expected,
        )

    def _full(self, key: str) -> str:
        if self.name:
            return f"{self.name}.{key}"
        return key


def format_value(value: object) -> str:
    """Return a value as messages show it: as Python spells it, and short."""
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        # Which Python may refuse to spell.
        return "a huge number"
    text = repr(value)
    if len(text) <= _SHOWN:
        return text
    return text[:_SHOWN] + " ..."


def printable(text: str, keep: str = "") -> str:
    """Return a string without control characters, which could drive a terminal: they are spelled,
    such as ``\\x1b``, except those in `keep`. Halves of surrogate pairs, which cannot be encoded,
    are spelled too.
    """
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def finite(value: object) -> Any:
    """Plain values for JSON: NaN and infinite numbers become None, tuples become lists."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def shortest(value: Any) -> Any:
    """Return a number that was stored as float32 as the shortest decimal that rounds to it;
    anything else is unchanged.
    """
    if isinstance(value, list):
        return [shortest(one) for one in value]
    if not isinstance(value, float):
        return value
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return value
    if struct.unpack("<f", stored)[0] != value:
        return value  # a float64
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((decimal for decimal in decimals if struct.pack("<f", decimal) == stored), value)


def within(value: object) -> list[object]:
    """Return a value and, for lists and objects, everything inside."""
    result = [value]
    for one in result:
        if isinstance(one, dict | list):
            result.extend(one.values() if isinstance(one, dict) else one)
    return result


def depth(value: object) -> int:
    """Return how deep lists and objects are nested."""
    deep = 0
    level = [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        deep += 1
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return deep
