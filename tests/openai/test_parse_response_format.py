"""``response_format`` of requests: what is refused, and the grammar of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import RequestError
from quantkit.openai.response_format import parse_response_format


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("json", "'response_format' is not known"),
        ({"type": "grammar"}, "expected an object with the type text, json_object or json_schema"),
        ({"type": "json_object", "schema": {}}, "unknown key 'schema' in 'response_format'"),
        ({"type": "json_schema"}, "'json_schema' is of the wrong type"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "'schema' is missing"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
            "'json_schema.name' is invalid",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}},
            "json_schema.strict",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "mode": 1}},
            "unknown key 'mode'",
        ),
    ],
)
def test_a_response_format_is_checked(given: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_response_format(given)
    assert message in str(error.value)


def test_text_has_no_grammar() -> None:
    assert parse_response_format({"type": "text"}) is None
    assert parse_response_format({"type": "json_object"}) == parse_response_format(
        {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
        }
    )
