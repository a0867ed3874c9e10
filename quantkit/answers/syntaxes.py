"""How families of models write calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quantkit.answers.calls import Syntax
from quantkit.answers.pieces import Call
from quantkit.base.json_values import MAX_DEPTH, depth

_MAX_HEAD = 200


class Hermes:
    """Hermes and Qwen 2.5 and 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    opens: str = "<tool_call>"
    closes: str = "</tool_call>"
    bare: bool = False
    separator: str | None = None
    marks: tuple[str, ...] = ("<tool_call>", "</tool_call>")

    def start(self, text: str) -> int | None:
        return _first(text, "{")

    def calls(self, head: str, value: str) -> list[Call] | None:
        return _parse_call(_load_json(value), "arguments")


class Llama3:
    """Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}``, some after ``<|python_tag|>``."""

    opens: str = "<|python_tag|>"
    closes: str = ""
    bare: bool = True
    separator: str | None = ";"
    marks: tuple[str, ...] = ("<|python_tag|>",)

    def start(self, text: str) -> int | None:
        return _first(text, "{")

    def calls(self, head: str, value: str) -> list[Call] | None:
        return _parse_call(_load_json(value), "parameters", "arguments")


class Mistral:
    """Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and later
    ``[TOOL_CALLS]NAME[ARGS]{...}``.
    """

    opens: str = "[TOOL_CALLS]"
    closes: str = ""
    bare: bool = False
    separator: str | None = None
    marks: tuple[str, ...] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _head = re.compile(
        r"\s*([a-zA-Z0-9_.-]+) *(?:\[CALL_ID\][a-zA-Z0-9]*)? *(?:\[ARGS\])?\s*", re.ASCII
    )

    def start(self, text: str) -> int | None:
        if (place := _first(text, "[")) != -1:
            return place
        place = text.find("{")
        possible = "\n" not in text.strip() and len(text) <= _MAX_HEAD
        if place < 0:
            return -1 if not possible else None
        if self._head.fullmatch(text[:place]):
            return place
        return -1

    def calls(self, head: str, value: str) -> list[Call] | None:
        if value.startswith("{"):
            match = self._head.fullmatch(head)
            arguments = _load_json(value)
            if match is None or not isinstance(arguments, dict):
                return None
            return [Call(match[1], _json(arguments))]
        listed = _load_json(value)
        if head.strip() or not isinstance(listed, list) or not listed:
            return None
        calls = [_parse_call(one, "arguments") for one in listed]
        if None in calls:
            return None
        return [call for one in calls if one is not None for call in one]


SYNTAXES: Mapping[str, Callable[[], Syntax]] = {
    "hermes": Hermes,
    "llama3": Llama3,
    "mistral": Mistral,
    "mistral_args": Mistral,
}
"""By name; the last two are read in the same way, and the models write the one or the other."""


def syntax_of(template: str, tokens: Mapping[str, int]) -> str | None:
    """Return the name of the syntax in which a model calls tools, by its chat template and its
    special tokens; None if it is none of these.
    """
    if "<tool_call>" in template:
        if "<function=" in template or "<arg_key>" in template:
            return None
        return "hermes"
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return "mistral_args"
        return "mistral"
    named = "<|python_tag|>" in template or "<|python_tag|>" in tokens
    if named and '"parameters"' in template:
        return "llama3"
    return None


def _first(text: str, bracket: str) -> int | None:
    """Return where a bracket is that only space is before; None if there is nothing else yet, -1 if
    something else is.
    """
    start = text.lstrip()
    if not start:
        return None
    if start.startswith(bracket):
        return len(text) - len(start)
    return -1


def _parse_call(value: Any, *keys: str) -> list[Call] | None:
    """Return the call that an object is, with its arguments under one of the keys."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = next((one for one in keys if one in value), None)
    if key is not None and isinstance(value[key], dict):
        return [Call(value["name"], _json(value[key]))]
    return None


def _load_json(text: str) -> Any:
    """Return the JSON value of a text; None if it is none."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        if depth(value) <= MAX_DEPTH:
            return value
        return None
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
