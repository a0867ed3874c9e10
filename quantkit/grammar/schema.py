"""JSON schemas (draft 2020-12) as grammars can follow them: each keyword that constrains is
supported or refused.

`check_schema` returns a schema of the supported keywords alone. Its references lead to ``$defs``,
and a schema that combines keywords with references, or several of ``anyOf``, ``oneOf`` and
``allOf``, becomes an ``allOf`` of them, so no keyword depends on its place in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from quantkit.base.json_values import collect_values, format_value
from quantkit.errors import RequestError
from quantkit.grammar.one_of import are_disjoint

MAX_CHARACTERS = 200_000
"""Of a schema as JSON."""

MAX_SCHEMAS = 5000
"""Schemas in a schema."""

MAX_PROPERTIES = 1000
"""Of one object."""

# Items, or letters: no answer has more.
_MAX_COUNT = 10**6
# Floats represent every integer up to this one.
_MAX_NUMBER = 2**53
# The grammar of a multiple has as many states as the number.
_MAX_MULTIPLE = 10_000
# Keywords that constrain no value.
_ANNOTATIONS = {
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentMediaType",
    "contentEncoding",
    "contentSchema",
    "discriminator",
    "$defs",
    "definitions",
}
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_COMBINED = ("anyOf", "oneOf", "allOf")
_LOWER = {"minItems", "minLength", "minProperties"}
_UPPER = {"maxItems", "maxLength", "maxProperties"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}

_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"(?:(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26]))|(?:(?:0[48]|[2468][048]|[13579][26])00))"
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_HOUR_MINUTE = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+-]{_HOUR_MINUTE})"
_PATTERNS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}[tT]{_TIME}$"}
"""Formats as patterns: llguidance's own allow days that no calendar has."""
FORMATS = (*_PATTERNS, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")


def check_schema(schema: object) -> dict[str, Any]:
    """Check a schema and reduce it to the supported keywords. Raises `RequestError` for one that is
    invalid, too large, or has a keyword that is not supported, with its place.
    """
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            "the JSON schema is of the wrong type", found=format_value(schema), expected="an object"
        )
    size = len(json.dumps(schema))
    if size > MAX_CHARACTERS:
        raise RequestError(
            "the JSON schema is too large",
            found=size,
            expected=f"at most {MAX_CHARACTERS} characters",
        )
    return _Reader(schema).whole()


class _Reader:
    """Reads one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        # Names of definitions, by the references to them.
        self._names = dict[str, str]()
        self._schemas = 0
        # The least common multiple of all `multipleOf`, because a value may have to satisfy several
        # of them.
        self._multiple = 1

    def whole(self) -> dict[str, Any]:
        schema = self._schema(self._root, "#")
        definitions = dict[str, Any]()
        done = 0
        # Reading a definition can add names of further definitions.
        while done < len(self._names):
            pointer, name = list(self._names.items())[done]
            definitions[name] = self._schema(self._target(pointer), pointer)
            done += 1
        if schema is False:
            raise RequestError("no value satisfies the JSON schema", found="false")
        if schema is True:
            schema = {}
        result: dict[str, Any] = schema
        if definitions:
            result = {**schema, "$defs": definitions}
        return result

    def _schema(self, node: Any, place: str) -> Any:
        """Check the schema at a place and reduce it to the supported keywords."""
        # Counted first, so that a deep or recursive schema ends.
        self._schemas += 1
        if self._schemas > MAX_SCHEMAS:
            raise RequestError(
                "the JSON schema is too large", expected=f"at most {MAX_SCHEMAS} schemas in it"
            )
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise _wrong(place, node, "a schema, which is an object or a boolean")
        keywords: dict[str, Any] = {}
        # References, combinations and the patterns of formats become schemas of their own, so that
        # none replaces or depends on another keyword of this schema.
        conjuncts: list[Any] = []
        for keyword in self._constraining(node, place):
            value = node[keyword]
            keyword_place = f"{place}/{keyword}"
            if keyword == "$ref":
                conjuncts.append({"$ref": f"#/$defs/{self._name(value, keyword_place)}"})
            elif keyword in _COMBINED:
                alternatives: list[Any] = []
                for index, alternative in enumerate(_list(value, keyword_place, 1)):
                    alternatives.append(self._schema(alternative, f"{keyword_place}/{index}"))
                if keyword == "allOf":
                    conjuncts += alternatives
                else:
                    conjuncts.append(self._either(keyword, value, alternatives))
            elif keyword == "format" and _format(value, keyword_place) in _PATTERNS:
                conjuncts.append({"pattern": _PATTERNS[value]})
            else:
                keywords[keyword] = self._keyword(keyword, value, keyword_place)
        keywords = _drop_implied_minimum(keywords, place)
        if keywords:
            conjuncts.insert(0, keywords)
        if len(conjuncts) > 1:
            return {"allOf": conjuncts}
        if conjuncts:
            return conjuncts[0]
        return True

    def _constraining(self, node: Mapping[str, Any], place: str) -> list[str]:
        """List the keywords of a schema that constrain its values, and refuse unsupported ones."""
        constraining: list[str] = []
        for keyword, value in node.items():
            # Keywords with x- are extensions, except llguidance's own, which would change how it
            # reads the schema.
            if keyword in _ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            if keyword == "$id" and place == "#":
                continue
            if keyword == "uniqueItems" and value is False:
                continue
            # Formats of other types, such as OpenAPI's int32, constrain no string.
            if (
                keyword == "format"
                and isinstance(node.get("type"), str)
                and node["type"] != "string"
            ):
                continue
            if keyword not in _KEYWORDS:
                raise RequestError(
                    f"the JSON schema has the keyword {format_value(keyword)},"
                    " which is not supported",
                    found=f"{place}/{keyword}",
                    expected=", ".join(_KEYWORDS),
                )
            constraining.append(keyword)
        # 'additionalProperties' depends on the properties, which must precede it.
        return sorted(constraining, key=list(_KEYWORDS).index)

    def _keyword(self, keyword: str, value: Any, place: str) -> Any:
        if keyword in ("properties", "patternProperties"):
            if not isinstance(value, Mapping):
                raise _wrong(place, value, "an object of schemas")
            if len(value) > MAX_PROPERTIES:
                raise RequestError(
                    "too many properties", found=place, expected=f"at most {MAX_PROPERTIES}"
                )
            properties: dict[str, Any] = {}
            for name, schema in value.items():
                properties[name] = self._schema(schema, f"{place}/{_escape_pointer(name)}")
            return properties
        if keyword == "prefixItems":
            items: list[Any] = []
            for index, schema in enumerate(_list(value, place, 1)):
                items.append(self._schema(schema, f"{place}/{index}"))
            return items
        if keyword in ("items", "additionalProperties"):
            if isinstance(value, list):
                raise RequestError(
                    "'items' is a list", found=place, hint="use 'prefixItems', as in draft 2020-12"
                )
            return self._schema(value, place)
        if keyword == "multipleOf":
            return self._multiple_of(value, place)
        return _KEYWORDS[keyword](value, place)

    def _multiple_of(self, value: Any, place: str) -> Any:
        number = _number(value, place)
        if number <= 0:
            raise _wrong(place, value, "a number above 0")
        # The shortest decimal that is the float, since JSON's numbers are decimals.
        digits = Decimal(repr(number)).normalize().as_tuple()
        # Digits without a decimal point: the grammar of 0.25 has as many states as that of 25.
        coefficient = int("".join(map(str, digits.digits))) * 10 ** max(0, int(digits.exponent))
        self._multiple = math.lcm(self._multiple, coefficient)
        if self._multiple > _MAX_MULTIPLE or int(digits.exponent) < -9:
            problem = (
                "the values of 'multipleOf' have too many digits, or together too large a multiple"
            )
            raise RequestError(problem, found=place, expected=f"at most {_MAX_MULTIPLE}")
        return value

    def _either(self, keyword: str, schemas: list[Any], parts: list[Any]) -> Any:
        """Write ``anyOf`` or ``oneOf``. If no value satisfies two of the schemas, ``oneOf``
        becomes ``anyOf``, which has the same values.
        """
        if keyword == "oneOf":
            targets = [self._follow_reference(schema) for schema in schemas]
            if are_disjoint(targets):
                keyword = "anyOf"
        return {keyword: parts}

    def _follow_reference(self, node: Any) -> Any:
        """Replace a schema that is nothing but a reference by the one that it leads to."""
        # References may form a cycle, so only some are followed.
        for _ in range(8):
            if not isinstance(node, Mapping) or "$ref" not in node:
                break
            # Other keywords constrain the values further.
            if set(node) - _ANNOTATIONS != {"$ref"}:
                break
            node = self._target(node["$ref"])
        return node

    def _name(self, reference: Any, place: str) -> str:
        """Name the definition that a reference leads to, and note that it has to be read."""
        if not isinstance(reference, str):
            raise _wrong(place, reference, "a string")
        if reference != "#" and not reference.startswith("#/"):
            raise RequestError(
                "the JSON schema refers to something outside itself, or to an anchor",
                found=format_value(reference),
                expected="a reference such as #/$defs/NAME",
            )
        self._target(reference)
        return self._names.setdefault(reference, f"d{len(self._names)}")

    def _target(self, reference: str) -> Any:
        node = self._root
        # A JSON pointer (RFC 6901) in a URL fragment. ~1 is replaced before ~0, because ~01 is the
        # text ~1.
        for part in reference[1:].split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, Mapping) and key in node:
                node = node[key]
            else:
                raise RequestError(
                    "the JSON schema has a reference to a place that does not exist",
                    found=reference,
                )
        return node


def _drop_implied_minimum(keywords: dict[str, Any], place: str) -> dict[str, Any]:
    """Remove a ``minProperties`` that ``required`` implies from a schema's keywords."""
    fewest = keywords.get("minProperties")
    # llguidance supports a minimum of 1.
    if fewest is None or fewest == 1:
        return keywords
    if fewest > len(set(keywords.get("required", []))):
        raise RequestError(
            "'minProperties' is above 1, and above the number of required properties",
            found=place,
            hint="list the mandatory properties in 'required'",
        )
    return {key: value for key, value in keywords.items() if key != "minProperties"}


def _list(value: Any, place: str, fewest: int = 0) -> list[Any]:
    if not isinstance(value, list) or len(value) < fewest:
        raise _wrong(place, value, "a list" if not fewest else "a list that is not empty")
    return value


def _names(value: Any, place: str) -> list[str]:
    for name in _list(value, place):
        if not isinstance(name, str):
            raise _wrong(place, value, "a list of strings")
    return list(dict.fromkeys(value))


def _type(value: Any, place: str) -> Any:
    if isinstance(value, str):
        names = [value]
    else:
        names = _list(value, place, 1)
    for name in names:
        if name not in _TYPES:
            raise RequestError(
                "the JSON schema has an unknown type",
                found=format_value(name),
                expected=", ".join(_TYPES),
            )
    return value


def _values(value: Any, place: str) -> list[Any]:
    for element in collect_values(_list(value, place, 1)):
        if isinstance(element, int | float) and abs(element) > _MAX_NUMBER:
            raise RequestError(
                "a number is too large", found=place, expected=f"at most {_MAX_NUMBER}"
            )
    return value  # type: ignore[no-any-return]


def _count(value: Any, place: str) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != int(value)
        or value < 0
    ):
        raise _wrong(place, value, "an integer, 0 or more")
    keyword = place.rpartition("/")[2]
    # A lower bound that no answer reaches is an error; an upper bound is reduced instead, because
    # that changes no answer.
    if value > _MAX_COUNT and keyword in _LOWER:
        raise RequestError(
            f"'{keyword}' is larger than any answer can reach",
            found=place,
            expected=f"at most {_MAX_COUNT}",
        )
    return min(int(value), _MAX_COUNT)


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(place, value, "a number")
    if abs(value) > _MAX_NUMBER:
        raise RequestError("a number is too large", found=place, expected=f"at most {_MAX_NUMBER}")
    return value


def _pattern(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong(place, value, "a string")
    return value


def _format(value: Any, place: str) -> str:
    if not isinstance(value, str) or value not in FORMATS:
        raise RequestError(
            f"the JSON schema has the format {format_value(value)}, which is not supported",
            found=place,
            expected=", ".join(FORMATS),
        )
    return value


def _accept_any_value(value: Any, place: str) -> Any:
    return value


# In the order in which `_Reader` writes them. Keywords that contain schemas accept any value here,
# because `_Reader` checks them.
_KEYWORDS: dict[str, Callable[[Any, str], Any]] = {
    "type": _type,
    "enum": _values,
    "const": lambda value, place: _values([value], place)[0],
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), _accept_any_value),
    "required": _names,
    **dict.fromkeys(("minProperties", "maxProperties"), _count),
    **dict.fromkeys(("items", "prefixItems"), _accept_any_value),
    **dict.fromkeys(("minItems", "maxItems"), _count),
    **dict.fromkeys(("minLength", "maxLength"), _count),
    "pattern": _pattern,
    "format": _format,
    **dict.fromkeys(sorted(_BOUNDS), _number),
    "multipleOf": _accept_any_value,
    **dict.fromkeys((*_COMBINED, "$ref"), _accept_any_value),
}
"""The supported keywords; each checks its value, but for those that hold schemas."""


def _escape_pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _wrong(place: str, value: object, expected: str) -> RequestError:
    return RequestError(
        f"the JSON schema is invalid at {place}", found=format_value(value), expected=expected
    )
