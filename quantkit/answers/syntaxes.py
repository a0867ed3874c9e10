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
        return _one(_loaded(value), "arguments")


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
        return _one(_loaded(value), "parameters", "arguments")


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
        return (
            (-1 if not possible else None)
            if place < 0
            else place
            if self._head.fullmatch(text[:place])
            else -1
        )

    def calls(self, head: str, value: str) -> list[Call] | None:
        if value.startswith("{"):
            named, arguments = self._head.fullmatch(head), _loaded(value)
            return (
                None
                if named is None or not isinstance(arguments, dict)
                else [Call(named[1], _json(arguments))]
            )
        listed = _loaded(value)
        if head.strip() or not isinstance(listed, list) or not listed:
            return None
        calls = [_one(one, "arguments") for one in listed]
        return None if None in calls else [call for one in calls if one is not None for call in one]


SYNTAXES: Mapping[str, Callable[[], Syntax]] = {
    "hermes": Hermes,
    "llama3": Llama3,
    "mistral": Mistral,
    "mistral_args": Mistral,
}
"""By name; the last two are read in the same way, and the models write the one or the other."""


def syntax_of(template: str, tokens: Mapping[str, int]) -> str | None:
    """The name of the syntax in which a model calls tools, by its chat template and its special
    tokens; None if it is none of these.
    """
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if "[ARGS]" in template else "mistral"
    named = "<|python_tag|>" in template or "<|python_tag|>" in tokens
    return "llama3" if named and '"parameters"' in template else None


def _first(text: str, bracket: str) -> int | None:
    """Where a bracket is that only space is before; None if there is nothing else yet, -1 if
    something else is.
    """
    start = text.lstrip()
    return None if not start else len(text) - len(start) if start.startswith(bracket) else -1


def _one(value: Any, *keys: str) -> list[Call] | None:
    """The call that an object is, with its arguments under one of the keys."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = next((one for one in keys if one in value), None)
    return (
        [Call(value["name"], _json(value[key]))]
        if key is not None and isinstance(value[key], dict)
        else None
    )


def _loaded(text: str) -> Any:
    """The JSON value of a text; None if it is none."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        return value if depth(value) <= MAX_DEPTH else None
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
