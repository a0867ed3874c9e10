"""Read JSON from files strictly: refuse a value of another type or range than requested."""

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
# Of nested lists and objects.
MAX_DEPTH = 64
LFS_POINTER = b"version https://git-lfs.github.com/spec"
"""The first bytes of what git checks out in place of a large file that it has not downloaded."""
LINES_OF_ARRAY = "convert it to lines with jq -c '.[]'"
"""The hint for an array where a file needs JSON lines."""
INFINITY = {"__float__": "Infinity"}
"""How transformers writes infinity, which JSON does not have."""
# Keys of configs whose published files contain Python's `Infinity`: bounds of the steps of Mamba-2.
_MAY_BE_INFINITE = ("time_step_limit", "mamba_dt_limit")
_SHOWN = 60
# Control characters, and halves of surrogate pairs.
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
    """Parse the JSON object in a file's text. Raises `CheckpointError` if it is empty, not JSON,
    too deep, or not an object.
    """
    if not text.strip():
        raise CheckpointError("the file is empty", path=path, expected="a JSON object")
    try:
        value = json.loads(text)
    # Python's parser recurses, so it cannot read lists nested thousands deep.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", path=path, found=type(value).__name__)
    if measure_depth(value) > MAX_DEPTH:
        raise CheckpointError(
            "contains lists or objects nested too deep",
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
    not have, and for numbers that are infinite as floats; in the bounds of Mamba's steps, infinity
    becomes `INFINITY`.
    """
    settings = read_json(path)
    for key in _MAY_BE_INFINITE:
        bounds = settings.get(key)
        if isinstance(bounds, list):
            settings[key] = [dict(INFINITY) if bound == math.inf else bound for bound in bounds]
    for key, setting in settings.items():
        for value in collect_values(setting):
            if isinstance(value, float) and not math.isfinite(value):
                raise CheckpointError(
                    f"'{key}' contains a number that is not finite",
                    path=path,
                    found=format_value(setting),
                    expected="JSON's numbers",
                )
    return settings


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
        """Read the value of a key that must exist, of any type."""
        if not self.has(key):
            owner = f"{self.name} " if self.name else ""
            raise CheckpointError(f"{owner}lacks the key '{key}'", path=self.path, hint=hint)
        return self.values[key]

    def integer(self, key: str, low: int, high: int) -> int:
        """Read an integer from `low` to `high`; floats, strings and booleans are refused."""
        value = self.need(key)
        expected = f"an integer from {low} to {high}"
        # `isinstance` would accept true and false.
        if type(value) is not int:
            self.wrong_type(key, expected)
        if not low <= value <= high:
            self._out_of_range(key, expected)
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """Read an integer or a float from `low` to `high`."""
        value = self.need(key)
        expected = f"a number from {low:g} to {high:g}"
        if type(value) not in (int, float):
            self.wrong_type(key, expected)
        # Python reads NaN from JSON; this comparison is false for it.
        if not low <= value <= high:
            self._out_of_range(key, expected)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Read a boolean; `default` if the key is absent."""
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
        """Read a list of strings."""
        values = self.need(key)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self.wrong_type(key, "a list of strings")
        return values

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        """Read a list of integers and floats, each from `low` to `high`."""
        values = self.need(key)
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            self.wrong_type(key, "a list of numbers")
        if not all(low <= value <= high for value in values):
            self._out_of_range(key, f"numbers from {low:g} to {high:g}")
        return tuple(float(value) for value in values)

    def integers(self, key: str, low: int, high: int) -> list[int]:
        """Read a list of integers, each from `low` to `high`; floats, strings and booleans are
        refused.
        """
        values = self.need(key)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            self.wrong_type(key, "a list of integers")
        if not all(low <= value <= high for value in values):
            self._out_of_range(key, f"integers from {low} to {high}")
        return values

    def objects(self, key: str) -> list[Settings]:
        """Read a list of objects; empty if the key is absent."""
        items = self.values.get(key, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            self.wrong_type(key, "a list of objects")
        objects: list[Settings] = []
        for index, item in enumerate(items):
            objects.append(Settings(item, self.path, f"{self._full(key)}[{index}]"))
        return objects

    def ids(self, key: str) -> tuple[int, ...]:
        """Read token ids: a single one, a list of them, or none if the key is absent."""
        value = self.values.get(key)
        if value is None:
            ids = []
        elif isinstance(value, list):
            ids = value
        else:
            ids = [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            self.wrong_type(key, "a token id, or a list of them")
        return tuple(ids)

    def inside(self, key: str) -> Settings:
        """Read an object within this one."""
        value = self.need(key)
        if not isinstance(value, dict):
            self.wrong_type(key, "an object")
        return Settings(value, self.path, self._full(key))

    def wrong_type(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"has a value of the wrong type for '{self._full(key)}'",
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
    """Format a value for messages: as Python spells it, and short."""
    # Python refuses to spell integers of more than a few thousand digits.
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "a huge number"
    text = repr(value)
    if len(text) <= _SHOWN:
        return text
    return text[:_SHOWN] + " ..."


def spell_control_characters(text: str, keep: str = "") -> str:
    """Spell control characters, which could drive a terminal, such as ``\\x1b``, except those in
    `keep`; also halves of surrogate pairs, which cannot be encoded.
    """

    def spell(match: re.Match[str]) -> str:
        character = match[0]
        if character in keep:
            return character
        # Without the quotation marks of `ascii`.
        return ascii(character)[1:-1]

    return _CONTROL.sub(spell, text)


def replace_non_finite(value: object) -> Any:
    """Convert a value to what JSON can hold: NaN and infinite numbers become None, tuples become
    lists.
    """
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# The largest number that rounds to a finite float32: half a unit above the largest float32.
_MAX_FLOAT32 = (2 - 2**-24) * 2.0**127


def shorten_float32(value: Any) -> Any:
    """Replace a number that was stored as float32 by the shortest decimal that rounds to it; leave
    any other value unchanged.
    """
    if isinstance(value, list):
        return [shorten_float32(item) for item in value]
    if not isinstance(value, float):
        return value
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return value
    # The number is a float64, not a float32.
    if struct.unpack("<f", stored)[0] != value:
        return value
    # Nine significant digits identify every float32.
    for digits in range(1, 10):
        decimal = float(f"{value:.{digits}g}")
        # The largest numbers, rounded up to few digits, are beyond the range of float32.
        if abs(decimal) <= _MAX_FLOAT32 and struct.pack("<f", decimal) == stored:
            return decimal
    return value


def collect_values(value: object) -> list[object]:
    """Collect a value and, for lists and objects, everything inside."""
    values = [value]
    # The loop also visits what it appends. Recursion would fail on deep nesting.
    for item in values:
        if isinstance(item, dict):
            values.extend(item.values())
        elif isinstance(item, list):
            values.extend(item)
    return values


def measure_depth(value: object) -> int:
    """Count the levels of nested lists and objects."""
    levels = 0
    items = [value]
    # Level by level, as recursion would fail on the deep nesting that this is to find.
    while True:
        containers = [item for item in items if isinstance(item, dict | list)]
        if not containers:
            return levels
        levels += 1
        items = []
        for container in containers:
            if isinstance(container, dict):
                items.extend(container.values())
            else:
                items.extend(container)
