"""``tools`` and ``tool_choice`` of OpenAI's API, and the grammars of the calls that they allow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.base.arguments import as_string, require_flags
from quantkit.base.json_values import format_value
from quantkit.errors import RequestError
from quantkit.grammar.lark import json_rule
from quantkit.grammar.schema import MAX_CHARACTERS, check_schema

MAX_TOOLS = 128
"""Of one request, as in OpenAI's API."""

# Characters of a grammar.
_MAX_CHARACTERS = 2 * MAX_CHARACTERS
# Calls of one answer in which calls are required.
_MAX_CALLS = 16
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}", re.ASCII)
_EXPECTED = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
_CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": "..."}}'
# The schema of the arguments of a function without parameters.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tools:
    """Checked functions, and which of them an answer must or may call.

    Attributes:
        definitions: as in the request, for chat templates.
        parameters: the JSON schema of each function's arguments, by its name.
        strict: the functions whose arguments must satisfy their schema whenever they are called.
        required: the functions of which one must be called; empty if none must.
        parallel: whether one answer may have several calls.
    """

    definitions: list[dict[str, Any]]
    parameters: dict[str, Any]
    strict: frozenset[str]
    required: tuple[str, ...]
    parallel: bool

    def grammar(self, syntax: str, spell_mark: Callable[[str], str]) -> str | None:
        """Write the grammar of the answers that are allowed, as `Grammars` takes it; None if that
        is any text.

        Args:
            syntax: the name of the family's syntax.
            spell_mark: writes a mark of the family as part of a rule.

        Raises:
            RequestError: if a schema has keywords that are not supported.
        """
        if not self.required and not self.strict:
            return None
        names = self.required or tuple(self.parameters)
        # The arguments of a required call satisfy their schema even if the function is not strict.
        restricted = set(names) if self.required else self.strict
        arguments = [self._arguments(name, name in restricted) for name in names]
        grammar = _GRAMMARS[syntax](names, spell_mark, self.parallel, bool(self.required))
        for number, schema in enumerate(arguments):
            grammar += f"args_{number}: {json_rule(schema)}\n"
        if len(grammar) > _MAX_CHARACTERS:
            raise RequestError(
                "the tools are too large",
                found=len(grammar),
                expected=f"{_MAX_CHARACTERS} characters",
            )
        return grammar

    def _arguments(self, name: str, restricted: bool) -> dict[str, Any]:
        if not restricted:
            return {"type": "object"}
        schema = self.parameters[name]
        return check_schema({"type": "object", **schema})


def check_tools(tools: object, choice: object, parallel: object) -> Tools | None:
    """Check the tools of a request; None if there are none, or none may be called.

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
        function = _function(tool)
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


def _function(tool: object) -> dict[str, Any]:
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
    return {"name": name, "parameters": parameters or _NOTHING, "strict": strict}


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


def _hermes(
    names: Sequence[str], spell_mark: Callable[[str], str], parallel: bool, required: bool
) -> str:
    opens = spell_mark("<tool_call>")
    closes = spell_mark("</tool_call>")
    body = _bodies(names, "arguments") + f'rest: "\\n" body "\\n" {closes}\n'
    if required:
        if parallel:
            further_calls = f' ("\\n" call){{0,{_MAX_CALLS - 1}}}'
        else:
            further_calls = ""
        return f"answer: call{further_calls}\ncall: {opens} rest\n" + body
    return _among_text(opens, parallel) + body


def _mistral(
    names: Sequence[str], spell_mark: Callable[[str], str], parallel: bool, required: bool
) -> str:
    # One mark opens a list of all calls.
    if parallel:
        further_calls = f' ("," " "? body){{0,{_MAX_CALLS - 1}}}'
    else:
        further_calls = ""
    body = _bodies(names, "arguments") + f'rest: " "? "[" body{further_calls} "]"\n'
    opens = spell_mark("[TOOL_CALLS]")
    if required:
        return f"answer: {opens} rest\n" + body
    return _among_text(opens, parallel=False) + body


def _mistral_args(
    names: Sequence[str], spell_mark: Callable[[str], str], parallel: bool, required: bool
) -> str:
    opens = spell_mark("[TOOL_CALLS]")
    args = spell_mark("[ARGS]")
    alternatives: list[str] = []
    for number, name in enumerate(names):
        alternatives.append(f"{json.dumps(name)} {args} args_{number}")
    body = f"rest: {' | '.join(alternatives)}\n"
    if required:
        if parallel:
            further_calls = f" call{{0,{_MAX_CALLS - 1}}}"
        else:
            further_calls = ""
        return f"answer: call{further_calls}\ncall: {opens} rest\n" + body
    return _among_text(opens, parallel) + body


def _llama3(
    names: Sequence[str], spell_mark: Callable[[str], str], parallel: bool, required: bool
) -> str:
    body = _bodies(names, "parameters")
    if required:
        return "answer: body\n" + body
    tag = spell_mark("<|python_tag|>")
    # An answer that begins with a brace is a call, so other text must begin with another letter.
    return f"answer: PLAIN? | {tag}? body\nPLAIN: /[^{{ \\n\\t](.|\\n)*/\n" + body


_GRAMMARS: dict[str, Callable[[Sequence[str], Callable[[str], str], bool, bool], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "mistral_args": _mistral_args,
}


def _bodies(names: Sequence[str], key: str) -> str:
    """Write the rule ``body`` of an object with a function's name and its arguments."""
    alternatives: list[str] = []
    for number, name in enumerate(names):
        # The outer dumps quotes the beginning of the object as a string of the grammar.
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": ')
        alternatives.append(f'{head} args_{number} "}}"')
    return f"body: {' | '.join(alternatives)}\n"


def _among_text(opens: str, parallel: bool) -> str:
    """Write rules for any text in which the rule ``rest`` describes what follows each `opens`."""
    calls = "call*" if parallel else "call?"
    begin = f"head: TEXT {opens}\n"
    # A mark that is text could also be part of TEXT. A lazy rule ends at the first mark.
    if opens.startswith('"'):
        begin = f"head[lazy]: TEXT {opens}\n"
    return f"answer: {calls} tail\ntail: TEXT\nTEXT: /(.|\\n)*/\n{begin}call: head rest\n"
