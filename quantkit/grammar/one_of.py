"""Whether no value satisfies two of several JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

_CLOSED = 2000  # pairs that are compared


def are_disjoint(schemas: Sequence[Any]) -> bool:
    """Return whether that is seen from their types, their values, or properties that all objects
    have, such as the name of a kind. False where it is not.
    """
    if len(schemas) * (len(schemas) - 1) // 2 > _CLOSED:
        return False
    return all(_are_disjoint(*pair) for pair in combinations(schemas, 2))


def _are_disjoint(schema: Any, other: Any) -> bool:
    if schema is False or other is False:
        return True
    if not isinstance(schema, Mapping) or not isinstance(other, Mapping):
        return False
    types = _types(schema), _types(other)
    if types[0] is not None and types[1] is not None and not types[0] & types[1]:
        return True
    values = _values(schema), _values(other)
    if values[0] is not None and values[1] is not None and not values[0] & values[1]:
        return True
    if types != ({"object"}, {"object"}):
        return False
    required = set(_list(schema, "required")) & set(_list(other, "required"))
    these = schema.get("properties")
    those = other.get("properties")
    if not isinstance(these, Mapping) or not isinstance(those, Mapping):
        return False
    for name in required & these.keys() & those.keys():
        first = _values(these[name])
        second = _values(those[name])
        if first is not None and second is not None and not first & second:
            return True
    return False


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the types that its values have, numbers as one; None if it does not say."""
    given = schema.get("type")
    if isinstance(given, str):
        found = [given]
    elif isinstance(given, list):
        found = given
    else:
        found = None
    if found is None:
        return None
    return {"number" if one == "integer" else str(one) for one in found}


def _values(schema: Any) -> set[str] | None:
    """Return the values that it lists, as JSON; None if it does not list them, or they are numbers,
    which JSON spells in several ways.
    """
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(
        isinstance(value, str | bool | None) for value in values
    ):
        return None
    return {json.dumps(value) for value in values}


def _list(schema: Mapping[str, Any], key: str) -> list[str]:
    found = schema.get(key, [])
    if isinstance(found, list):
        return [one for one in found if isinstance(one, str)]
    return []
