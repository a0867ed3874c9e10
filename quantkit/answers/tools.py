"""The tools that an answer may call, and the grammars of these calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import RequestError
from quantkit.grammar.lark import json_rule
from quantkit.grammar.schema import MAX_CHARACTERS, check_schema

# Characters of a grammar.
_MAX_CHARACTERS = 2 * MAX_CHARACTERS
# Calls of one answer in which calls are required.
_MAX_CALLS = 16


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
                expected=f"at most {_MAX_CHARACTERS} characters",
            )
        return grammar

    def _arguments(self, name: str, restricted: bool) -> dict[str, Any]:
        if not restricted:
            return {"type": "object"}
        schema = self.parameters[name]
        return check_schema({"type": "object", **schema})


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
