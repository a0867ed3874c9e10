"""Random JSON schemas of the keywords that answers can be restricted to, and what judges the
answers.
"""

from __future__ import annotations

import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

PATTERNS = [
    "^[a-c]{1,4}$",
    "^x-[0-9]{2}$",
    "b",
    "^(foo|bar)?$",
    r"^\d+\.\d$",
    "^[A-Z][a-z]*$",
    r"^\w{2,5}$",
    "^.?$",
]
NAMES = [
    "name",
    "type",
    "properties",
    "$ref",
    "enum",
    "a/b",
    "a~b",
    "größe",
    'q"',
    "x y",
    "items",
    "const",
    "0",
]
FORMATS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "date-time": lambda one: datetime.fromisoformat(one.upper()),
    "time": lambda one: datetime.fromisoformat(f"2000-01-01T{one.upper()}"),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "email": lambda one: _matched(r"[^@\s]+@[^@\s]+", one),
    "hostname": lambda one: _matched(r"[a-zA-Z0-9-]{1,63}(\.[a-zA-Z0-9-]{1,63})*", one),
    "duration": lambda one: _matched(
        r"P(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?|P\d+W", one
    ),
    "uri": lambda one: _matched(r"[a-zA-Z][a-zA-Z0-9+.-]*:[^\s\"<>\\^`{|}]*", one),
}
"""What reads a string of each format, and fails for others."""


def random_schema(seed: int) -> dict[str, Any]:
    """A schema whose values are mostly short."""
    return _Maker(random.Random(seed)).whole()


def judge(schema: dict[str, Any], answer: str) -> None:
    """Raise an error if an answer is no JSON, or the JSON of another schema."""
    checker = FormatChecker(formats=())
    for name, read in FORMATS.items():
        checker.checks(name, raises=ValueError)(
            lambda one, read=read: not isinstance(one, str) or bool(read(one) or 1)
        )
    Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer))


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        rng = self._rng
        for number in range(rng.randrange(3)):
            self._definitions[f"def {number}/~%"] = self._schema(2)
        if rng.random() < 0.3:
            self._definitions["tree"] = {
                "type": "object",
                "required": ["of"],
                "additionalProperties": False,
                "properties": {
                    "of": self._scalar(),
                    "in": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
            }
        found = self._schema(3)
        if self._definitions:
            found = {**found, "$defs": self._definitions}
        return (
            found
            if rng.random() < 0.5
            else {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
        )

    def _schema(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kinds: list[Callable[[], dict[str, Any]]] = [self._scalar, self._scalar]
        if depth:
            kinds += [lambda: self._object(depth - 1)] * 3 + [lambda: self._array(depth - 1)] * 2
            kinds += [lambda: self._combined(depth - 1)] * 2
        found = rng.choice(kinds)()
        if rng.random() < 0.15:
            found = {
                "title": "not a keyword",
                "description": "enum",
                "default": {"not": {}},
                **found,
            }
        return found

    def _scalar(self) -> dict[str, Any]:
        rng = self._rng
        kinds = [self._string, self._string, self._number, self._number, self._listed]
        if self._definitions:
            kinds += [lambda: {"$ref": f"#/$defs/{_pointer(rng.choice(list(self._definitions)))}"}]
        kinds += [lambda: {"type": rng.choice(["null", "boolean"])}]
        return rng.choice(kinds)()

    def _string(self) -> dict[str, Any]:
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0:
            low = rng.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(8)}
        if kind == 1:
            return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12}
        name = rng.choice(list(FORMATS))
        return {
            "type": "string",
            "format": name,
            **({"maxLength": 60} if name in ("uri", "email", "hostname") else {}),
        }

    def _number(self) -> dict[str, Any]:
        rng, found = self._rng, dict[str, Any]()
        integer = rng.random() < 0.6
        low = rng.choice([0, -5, 3, 17, -1000]) if integer else rng.choice([0, -0.5, 2.25, -10])
        found["type"] = "integer" if integer else rng.choice(["number", ["number", "null"]])
        found[rng.choice(["minimum", "exclusiveMinimum"])] = low
        found[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([2, 10, 4000])
        if integer and rng.random() < 0.3:
            found["multipleOf"] = rng.choice([1, 2])
        return found

    def _listed(self) -> dict[str, Any]:
        rng = self._rng
        values = rng.sample(
            [None, True, 1, -2.5, "a", 'b"\\', "größe\n", "", [1, "x"], {"k": [None]}, "enum"], 4
        )
        return {"const": values[0]} if rng.random() < 0.4 else {"enum": values[: rng.randint(1, 4)]}

    def _array(self, depth: int) -> dict[str, Any]:
        rng, found = self._rng, dict[str, Any]()
        found["type"] = "array"
        if rng.random() < 0.4:
            found["prefixItems"] = [self._schema(depth) for _ in range(rng.randint(1, 2))]
        found["items"] = False if rng.random() < 0.1 else self._schema(depth)
        low = 0 if found["items"] is False else rng.randrange(3)
        found |= {"minItems": low, "maxItems": low + rng.randrange(2)}
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 4))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._schema(depth) for name in names},
        }
        found["required"] = [name for name in names if rng.random() < 0.6]
        if (kind := rng.random()) < 0.75:
            found["additionalProperties"] = False
        elif kind < 0.9:
            found["additionalProperties"] = self._scalar()
        if rng.random() < 0.1:
            found["patternProperties"] = {"^p_[a-z]{1,3}$": self._scalar()}
        elif rng.random() < 0.1:
            found["minProperties"] = rng.randint(0, max(1, len(found["required"])))
        return dict(sorted(found.items(), key=lambda _: rng.random()))

    def _combined(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            return {"anyOf": [self._schema(depth) for _ in range(rng.randint(1, 3))]}
        if kind == 1:
            kinds = [
                {
                    "type": "object",
                    "required": ["kind"],
                    "properties": {"kind": {"const": name}, "of": self._schema(0)},
                    "additionalProperties": False,
                }
                for name in ("a", "b", "c")
            ]
            return {"oneOf": kinds[: rng.randint(1, 3)]}
        if kind == 2:
            base = self._object(depth)
            if rng.random() < 0.8:
                base.pop("additionalProperties", None)  # or it forbids what the other one requires
            extra = {"type": "object", "properties": {"more": self._scalar()}, "required": ["more"]}
            return {**base, "allOf": [extra]} if rng.random() < 0.3 else {"allOf": [base, extra]}
        return {"maxLength": 6, "anyOf": [{"type": "string"}, self._scalar()]}


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1").replace("%", "%25").replace(" ", "%20")


def _matched(pattern: str, one: str) -> str:
    if not re.fullmatch(pattern, one):
        raise ValueError(one)
    return one
