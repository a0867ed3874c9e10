"""``tools`` and ``tool_choice`` of requests, and calls of tools in messages and answers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantkit.answers.form import AnswerForm
from quantkit.answers.pieces import Call
from quantkit.answers.tools import Tools
from quantkit.base.arguments import as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.base.strict_json import parse_strict_object
from quantkit.errors import RequestError

MAX_TOOLS = 128
"""The maximum number of tools in one request, as in OpenAI's API."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)
_EXPECTED = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
_CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": "..."}}'
_CALL = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}'
# The schema of the arguments of a function without parameters.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def parse_tools(tools: object, choice: object, parallel: object) -> Tools | None:
    """Parse the tools of a request; None if there are none, or none may be called.

    Args:
        choice, parallel: its ``tool_choice`` and ``parallel_tool_calls``, None where it has none.

    Raises:
        RequestError: for a request that is invalid.
    """
    if tools is not None and not isinstance(tools, list):
        raise RequestError(
            "'tools' is of the wrong type",
            found=format_value(tools),
            expected=f"a list of {_EXPECTED}",
        )
    require_flags(parallel_tool_calls=True if parallel is None else parallel)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "'tool_choice' requires 'tools'",
                found=format_value(choice),
                argument="tool_choice",
            )
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError("too many tools", found=len(tools), expected=f"at most {MAX_TOOLS}")
    parameters = dict[str, Any]()
    strict = set[str]()
    # The tools are checked even if `tool_choice` is none, so that an invalid one is an error.
    for tool in tools:
        function = _parse_function(tool)
        name = function["name"]
        if name in parameters:
            raise RequestError("two tools have the same name", found=format_value(name))
        parameters[name] = function["parameters"]
        if function["strict"]:
            strict.add(name)
    if choice == "none":
        return None
    required = _find_required_functions(choice, tuple(parameters))
    # A choice of one function asks for one call.
    allow_several = parallel is not False and not _is_function_choice(choice)
    return Tools(
        definitions=tools,
        parameters=parameters,
        strict=frozenset(strict),
        required=required,
        parallel=allow_several,
    )


def _parse_function(tool: object) -> dict[str, Any]:
    """Check a tool and read its function, with defaults for missing keys."""
    if isinstance(tool, Mapping) and tool.get("type") == "function":
        function = tool.get("function")
    else:
        function = None
    if not isinstance(function, Mapping):
        raise RequestError(
            "a tool is of the wrong type", found=format_value(tool), expected=_EXPECTED
        )
    name = as_string("function.name", function.get("name"))
    if not _NAME.fullmatch(name):
        raise RequestError(
            "a tool has an invalid name",
            found=format_value(name),
            expected="up to 64 letters, digits, _ - .",
        )
    parameters = function.get("parameters")
    strict = function.get("strict") or False
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"the parameters of {format_value(name)} are not a JSON schema",
            found=format_value(parameters),
        )
    if parameters and parameters.get("type", "object") != "object":
        problem = f"the parameters of {format_value(name)} are of the wrong type"
        raise RequestError(problem, found=format_value(parameters["type"]), expected="object")
    require_flags(**{"function.strict": strict})
    return {"name": name, "parameters": parameters or _NO_PARAMETERS, "strict": strict}


def _is_function_choice(choice: object) -> bool:
    return isinstance(choice, Mapping)


def _find_required_functions(choice: object, names: Sequence[str]) -> tuple[str, ...]:
    """Find the functions of which one must be called; empty if none must."""
    if choice is None or choice == "auto":
        return ()
    if choice == "required":
        return tuple(names)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
    else:
        function = None
    if isinstance(function, Mapping):
        name = function.get("name")
    else:
        name = None
    if not isinstance(name, str):
        problem = "'tool_choice' is not known"
        raise RequestError(
            problem, found=format_value(choice), expected=_CHOICES, argument="tool_choice"
        )
    if name not in names:
        problem = "'tool_choice' names a function that is not among the tools"
        raise RequestError(problem, found=format_value(name), argument="tool_choice")
    return (name,)


def parse_call_arguments(messages: Any) -> Any:
    """Parse the arguments of calls in messages, which the API spells as JSON text and chat
    templates print as objects. Raises `RequestError` if they are no JSON object.
    """
    if not isinstance(messages, list):
        return messages
    parsed: list[Any] = []
    for message in messages:
        # Messages of a wrong type are reported by the chat format.
        if isinstance(message, Mapping) and message.get("tool_calls"):
            message = _parse_message_calls(message)
        parsed.append(message)
    return parsed


def _parse_message_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls: list[Mapping[str, Any]] = []
    tool_calls = message["tool_calls"]
    # Anything but a list is one call of the wrong type.
    for call in tool_calls if isinstance(tool_calls, list) else [None]:
        if isinstance(call, Mapping):
            function = call.get("function")
        else:
            function = None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise RequestError(
                "a message has a tool call of the wrong type",
                found=format_value(call),
                expected=_CALL,
                argument="messages",
            )
        # Some clients send objects already.
        if isinstance(function.get("arguments"), str):
            parsed = {**function, "arguments": _parse_arguments(function)}
            call = {**call, "function": parsed}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _parse_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a call, whose JSON may be empty."""
    text = function["arguments"]
    if not text.strip():
        return {}
    try:
        return parse_strict_object(text, '{"...": ...}')
    except RequestError as error:
        # The place is in the problem and not in the path, which a server keeps to itself.
        name = format_value(function.get("name"))
        problem = f"the arguments of a call of {name}: {error.problem}"
        raise error.restate(problem=problem, argument="messages") from error


def build_tool_call(call: Call, call_id: str) -> dict[str, Any]:
    """Convert a call to the form of the API's messages."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def create_call_namer(form: AnswerForm, request_id: str, sample: int) -> Callable[[int], str]:
    """Create a function that makes the identifier of each call of an answer from its number;
    Mistral's templates require 9 letters.
    """

    def name_call(number: int) -> str:
        # A hash instead of random numbers: the same inputs give the same bytes.
        digest = hashlib.sha256(f"{request_id}/{sample}/{number}".encode()).hexdigest()
        if (form.syntax or "").startswith("mistral"):
            return digest[:9]
        # As long as OpenAI's own identifiers.
        return f"call_{digest[:24]}"

    return name_call
