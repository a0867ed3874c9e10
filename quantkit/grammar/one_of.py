"""Decide whether no value satisfies two of several JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

# Pairs that are compared at most: their number grows with the square of the schemas'.
_CLOSED = 2000


def are_disjoint(schemas: Sequence[Any]) -> bool:
    """Decide it from their types, their values, or properties that all objects have, such as the
    name of a kind. False means that these do not show it.
    """
    if len(schemas) * (len(schemas) - 1) // 2 > _CLOSED:
        return False
    return all(_are_disjoint(*pair) for pair in combinations(schemas, 2))


def _are_disjoint(schema: Any, other: Any) -> bool:
    if schema is False or other is False:
        return True
    if not isinstance(schema, Mapping) or not isinstance(other, Mapping):
        return False
    types = _types(schema)
    other_types = _types(other)
    if _have_no_common_value(types, other_types):
        return True
    if _have_no_common_value(_values(schema), _values(other)):
        return True
    # Properties constrain objects alone: values of other types could satisfy both schemas.
    if types != {"object"} or other_types != {"object"}:
        return False
    required = set(_list(schema, "required")) & set(_list(other, "required"))
    properties = schema.get("properties")
    other_properties = other.get("properties")
    if not isinstance(properties, Mapping) or not isinstance(other_properties, Mapping):
        return False
    # An object without an optional property could satisfy both schemas.
    for name in required & properties.keys() & other_properties.keys():
        if _have_no_common_value(_values(properties[name]), _values(other_properties[name])):
            return True
    return False


def _have_no_common_value(first: set[str] | None, second: set[str] | None) -> bool:
    """Check that two sets are known and disjoint."""
    return first is not None and second is not None and not first & second


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """Collect the types that a schema allows, with integers as numbers; None if it has no
    ``type``.
    """
    type_keyword = schema.get("type")
    if isinstance(type_keyword, str):
        names = [type_keyword]
    elif isinstance(type_keyword, list):
        names = type_keyword
    else:
        return None
    types: set[str] = set()
    for name in names:
        # An integer is also a number.
        types.add("number" if name == "integer" else str(name))
    return types


def _values(schema: Any) -> set[str] | None:
    """Collect the values that a schema lists, as JSON; None if it does not list them, or they are
    numbers, which JSON spells in several ways.
    """
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    texts: set[str] = set()
    for value in values:
        if not isinstance(value, str | bool | None):
            return None
        texts.add(json.dumps(value))
    return texts


def _list(schema: Mapping[str, Any], key: str) -> list[str]:
    items = schema.get(key, [])
    if isinstance(items, list):
        return [item for item in items if isinstance(item, str)]
    return []
