"""How families of models write calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quantkit.answers.calls import Syntax
from quantkit.answers.pieces import Call
from quantkit.base.json_values import MAX_DEPTH, measure_depth

# The longest text between Mistral's mark and the arguments in which a call is still expected.
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
        list_start = _first(text, "[")
        if list_start != -1:
            return list_start
        object_start = text.find("{")
        if object_start < 0:
            # Text that cannot be a name and an id is content, so that a stream does not wait for an
            # object that never comes.
            may_be_head = "\n" not in text.strip() and len(text) <= _MAX_HEAD
            return None if may_be_head else -1
        if self._head.fullmatch(text[:object_start]):
            return object_start
        return -1

    def calls(self, head: str, value: str) -> list[Call] | None:
        # NAME[ARGS]{...}: the head contains the name.
        if value.startswith("{"):
            match = self._head.fullmatch(head)
            arguments = _load_json(value)
            if match is None or not isinstance(arguments, dict):
                return None
            return [Call(match[1], _json(arguments))]
        items = _load_json(value)
        if head.strip() or not isinstance(items, list) or not items:
            return None
        calls: list[Call] = []
        for item in items:
            item_calls = _parse_call(item, "arguments")
            if item_calls is None:
                return None
            calls += item_calls
        return calls


SYNTAXES: Mapping[str, Callable[[], Syntax]] = {
    "hermes": Hermes,
    "llama3": Llama3,
    "mistral": Mistral,
    "mistral_args": Mistral,
}
"""By name; the last two are read in the same way, and the models write the one or the other."""


def recognize_syntax(template: str, tokens: Mapping[str, int]) -> str | None:
    """Recognize the syntax in which a model calls tools, by its chat template and its special
    tokens; None if quantkit does not support it.
    """
    if "<tool_call>" in template:
        # Some templates use the mark for calls that are not JSON: <function=NAME> or <arg_key>.
        if "<function=" in template or "<arg_key>" in template:
            return None
        return "hermes"
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return "mistral_args"
        return "mistral"
    # A template need not contain the tag that its model writes, so the vocabulary counts too.
    has_python_tag = "<|python_tag|>" in template or "<|python_tag|>" in tokens
    if has_python_tag and '"parameters"' in template:
        return "llama3"
    return None


def _first(text: str, bracket: str) -> int | None:
    """Find a bracket that only space precedes; None if there is only space yet, -1 if the text
    begins with something else.
    """
    start = text.lstrip()
    if not start:
        return None
    if start.startswith(bracket):
        return len(text) - len(start)
    return -1


def _parse_call(value: Any, *keys: str) -> list[Call] | None:
    """Parse the call of an object, with its arguments under the first of the keys that it has;
    None if the object is not a call.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    for key in keys:
        if key not in value:
            continue
        if isinstance(value[key], dict):
            return [Call(value["name"], _json(value[key]))]
        return None
    return None


def _load_json(text: str) -> Any:
    """Parse JSON; None if the text is not valid JSON, or nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        if measure_depth(value) <= MAX_DEPTH:
            return value
        return None
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    # Python's json accepts NaN and Infinity, which are not JSON.
    raise ValueError(constant)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
