"""Read JSON objects of requests without losing anything: keys that occur twice, numbers that are
too large and deep nesting are errors.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from quantkit.base.json_values import MAX_DEPTH, collect_values, format_value, measure_depth
from quantkit.errors import RequestError

# Of an integer: Python raises an error when it spells more than 4300.
_MAX_DIGITS = 4000


def parse_strict_object(text: str, expected: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        expected: an example of an object, for the error.

    Raises:
        RequestError: if the text is not a JSON object, has a key twice, is nested too deep, or
            contains a number that is too large.
    """
    value: Any = None
    # Invalid JSON leaves None, for which the error below names what is expected.
    with suppress(ValueError, RecursionError):
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_int=_parse_integer,
            object_pairs_hook=_build_object,
        )
    if not isinstance(value, dict):
        raise RequestError(
            "is not a JSON object", found=format_value(text.strip()), expected=expected
        )
    _require_moderate(value)
    return value


def find_duplicate(keys: list[Any]) -> Any:
    """Find the first key that occurs more than once; None if all differ."""
    for key, times in Counter(keys).items():
        if times > 1:
            return key
    return None


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    duplicate = find_duplicate([key for key, _ in pairs])
    if duplicate is not None:
        raise RequestError(f"the key {format_value(duplicate)} occurs twice", argument=duplicate)
    return dict(pairs)


def _parse_integer(text: str) -> float:
    if len(text) > _MAX_DIGITS:
        # `_require_moderate` reports it, with its key.
        return math.inf
    return int(text)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _require_moderate(values: Mapping[str, Any]) -> None:
    """Raise a `RequestError` if a value is nested too deep, or a number is too large."""
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
