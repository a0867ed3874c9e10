"""Which JSON schemas are supported, and what errors say of the others."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import RequestError
from quantkit.grammar.schema import MAX_PROPERTIES, MAX_SCHEMAS, check_schema


def test_only_keywords_that_constrain_are_left_and_references_lead_to_definitions() -> None:
    found = check_schema(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "x",
            "title": "not",
            "x-order": 1,
            "type": "object",
            "additionalProperties": False,
            "uniqueItems": False,
            "properties": {"not": {"type": "string", "default": {"if": 1}}, "a/b": {"$ref": "#"}},
            "required": ["not", "not"],
            "$defs": {"unused": {"not": {}}},
            "anyOf": [{"required": ["a/b"]}, {"$ref": "#/properties/a~1b"}],
        }
    )
    root = {
        "type": "object",
        "properties": {"not": {"type": "string"}, "a/b": {"$ref": "#/$defs/d0"}},
        "additionalProperties": False,
        "required": ["not"],
    }
    either = {"anyOf": [{"required": ["a/b"]}, {"$ref": "#/$defs/d1"}]}
    assert found == {
        "allOf": [root, either],
        "$defs": {"d0": {"allOf": [root, either]}, "d1": {"$ref": "#/$defs/d0"}},
    }
    assert list(root) == ["type", "properties", "additionalProperties", "required"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, "keyword 'not', which is not supported (found #/not"),
        (
            {"properties": {"a": {"items": {"uniqueItems": True}}}},
            "found #/properties/a/items/uniqueItems",
        ),
        ({"x-guidance": {"lenient": True}}, "'x-guidance', which is not supported"),
        ({"$defs": {"a": {"if": {}}}, "$ref": "#/$defs/a"}, "found #/$defs/a/if"),
        ({"nullable": True, "type": "string"}, "'nullable'"),
        ({"items": {"$id": "x"}}, "'$id'"),
        ({"propertyNames": {"pattern": "a"}}, "'propertyNames'"),
        ({"$ref": "https://example.org/schema"}, "outside itself, or to an anchor"),
        ({"$ref": "#anchor"}, "outside itself, or to an anchor"),
        ({"$ref": "#/$defs/none"}, "a place that does not exist (found #/$defs/none)"),
        ({"format": "regex"}, "the format 'regex', which is not supported"),
        ({"format": ["date"]}, "the format ['date'], which is not supported"),
        ({"type": "float"}, "an unknown type (found 'float'"),
        ({"items": [{}]}, "use 'prefixItems'"),
        ({"minLength": 10**7}, "'minLength' is larger than any answer can reach"),
        ({"minItems": -1}, "invalid at #/minItems (found -1, expected an integer, 0 or more)"),
        ({"minimum": "1"}, "expected a number"),
        ({"minimum": 1e30}, "a number is too large"),
        ({"enum": []}, "expected a list that is not empty"),
        ({"multipleOf": 1000003}, "too large a multiple"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "too large a multiple"),
        ({"minProperties": 2, "required": ["a"]}, "'minProperties' is above 1"),
        ({"required": "a"}, "invalid at #/required"),
        ({"properties": {"a": 1}}, "invalid at #/properties/a"),
        (
            {"properties": {str(number): {} for number in range(MAX_PROPERTIES + 1)}},
            "too many properties",
        ),
        ({"anyOf": [{}] * MAX_SCHEMAS}, f"at most {MAX_SCHEMAS} schemas"),
        ({"const": "x" * 300_000}, "the JSON schema is too large"),
        (False, "no value satisfies"),
        ([], "of the wrong type"),
    ],
)
def test_what_is_not_supported_is_named(schema: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        check_schema(schema)
    assert message in str(error.value)


def test_formats_of_numbers_constrain_nothing() -> None:
    assert check_schema({"type": "integer", "format": "int32"}) == {"type": "integer"}
    with pytest.raises(RequestError, match="the format 'int32'"):
        check_schema({"type": ["integer", "string"], "format": "int32"})


def test_one_of_is_any_of_where_its_schemas_are_disjoint() -> None:
    """As pydantic writes unions whose kinds have names."""
    kinds = {
        name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
        for name in ("a", "b")
    }
    union = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}]
    found = check_schema(
        {"oneOf": union, "discriminator": {"propertyName": "kind"}, "$defs": kinds}
    )
    assert list(found) == ["anyOf", "$defs"]
    kinds["b"]["required"] = []
    assert list(check_schema({"oneOf": union, "$defs": kinds})) == ["oneOf", "$defs"]
    assert list(check_schema({"oneOf": [{"enum": ["a", None]}, {"const": True}]})) == ["anyOf"]
    assert list(check_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]})) == ["oneOf"]
    assert list(check_schema({"oneOf": [{"enum": ["a", 1]}, {"const": 1.0}]})) == ["oneOf"]
