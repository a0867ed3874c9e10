"""``response_format`` of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantkit.base.arguments import as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.errors import RequestError
from quantkit.grammar.lark import json_grammar
from quantkit.grammar.schema import check_schema

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_KEYS = {"name", "schema", "strict", "description"}
_EXPECTED = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'


def parse_response_format(response_format: object) -> str | None:
    """Parse a ``response_format``, and write the grammar of the answers that it allows, for
    `Grammars`; None if that is any text. Raises `RequestError` for one that is invalid or not
    supported.
    """
    if isinstance(response_format, Mapping):
        kind = response_format.get("type")
    else:
        kind = None
    if not isinstance(response_format, Mapping) or kind not in (
        "text",
        "json_object",
        "json_schema",
    ):
        expected = "an object with the type text, json_object or json_schema"
        raise RequestError(
            "'response_format' is not known", found=format_value(response_format), expected=expected
        )
    known_keys = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    unknown = response_format.keys() - known_keys
    if unknown:
        raise RequestError(
            f"unknown key {format_value(min(unknown))} in 'response_format'", expected=_EXPECTED
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar({"type": "object"})
    return json_grammar(check_schema(_parse_schema(response_format.get("json_schema"))))


def _parse_schema(described: Any) -> Any:
    if not isinstance(described, Mapping):
        raise RequestError(
            "'json_schema' is of the wrong type", found=format_value(described), expected=_EXPECTED
        )
    unknown = described.keys() - _KEYS
    if unknown:
        raise RequestError(
            f"unknown key {format_value(min(unknown))} in 'json_schema'",
            expected=", ".join(sorted(_KEYS)),
        )
    if not _NAME.fullmatch(as_string("json_schema.name", described.get("name"))):
        expected = "up to 64 letters, digits, _ and -"
        raise RequestError(
            "'json_schema.name' is invalid",
            found=format_value(described["name"]),
            expected=expected,
        )
    # Only checked: answers satisfy the schema in any case.
    strict = described.get("strict")
    require_flags(**{"json_schema.strict": False if strict is None else strict})
    if described.get("schema") is None:
        raise RequestError("'schema' is missing in 'json_schema'", expected=_EXPECTED)
    return described["schema"]
