"""Check that everything a conversation says reaches the prompt.

A chat template drops a message without an error if it does not know the message's role, and it drops tool calls if it
was written for a model without tools. The model would then answer another conversation.

The check renders the conversation once more with a mark in place of each statement, and searches the result for the
marks. Marks replace the statements instead of being added to them, because the text is then short, and a template that
trims or splits contents keeps a mark whole.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import CheckpointError, RequestError
from quantkit.json_values import shown
from quantkit.text.template_process import Budget

Conversation = dict[str, Any]
"""``messages``, and ``tools`` or None."""

Render = Callable[[Conversation, Budget], str]
"""Renders a conversation with the same variables each time."""

_TOOL_HINT = "leave them out"
_MESSAGE_HINT = "leave it out, or give it a role that the chat template knows"
_CALLS_HINT = "leave out the call and its result, or use a model whose chat template has tools"
_MARK = re.compile(r"(?:said|tool)\d+n\d+e")
# Beside `content`; reasoning is not among them: templates drop that of earlier answers, or do not know it.
_SAID_ELSEWHERE = ("refusal", "audio")


@dataclass(frozen=True)
class _Statement:
    """Something that a message says.

    Attributes:
        path: keys and indices of its value in a conversation.
        value: what it is.
        mark: a word that is nowhere in the conversation.
        hint: what to do if the template drops it.
    """

    path: tuple[str | int, ...]
    value: object
    mark: str
    hint: str

    @property
    def name(self) -> str:
        """Its place in a request, such as ``messages[0].content``."""
        keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path]
        return "".join(keys).removeprefix(".")

    @property
    def marked(self) -> object:
        """The mark, as a value of the same kind."""
        if isinstance(self.value, Mapping):
            return {self.mark: self.mark}
        if isinstance(self.value, list):
            return [self.mark]
        return self.mark


def require_traces(conversation: Conversation, *, text: str, render: Render, budget: Budget) -> None:
    """Require that each statement of a conversation leaves a trace in its prompt.

    All is well with one more rendering. Only a statement whose mark is missing costs another one, in which nothing else
    is changed: a template may shorten or translate what it prints, as long as the prompt depends on it.

    Text next to tool calls may be missing if the calls are there: Llama 3's and gpt-oss's templates leave it out.

    Args:
        text: the prompt.
        budget: of the prompt; its time is used, but not its length.

    Raises:
        RequestError: if a statement leaves no trace.
        CheckpointError: if the template takes too long.
    """
    plain: Conversation = _as_lists(conversation)
    statements = _statements(plain, text)
    if not statements and not plain["tools"]:
        return
    checks = Budget(seconds=budget.seconds, length=sys.maxsize, repeatable=True)
    try:
        _require_printed(plain, statements, text=text, render=render, checks=checks)
    finally:
        budget.seconds = checks.seconds


def _require_printed(
    conversation: Conversation, statements: Sequence[_Statement], *, text: str, render: Render, checks: Budget
) -> None:
    tool_marks = _tool_marks(conversation, text)
    marked = _with_marks(conversation, statements, tool_marks)
    rendered = _try_to_render(marked, render, checks)
    if rendered is None:
        # The template requires something of the contents. Most statements can be found as they are.
        missing = [statement for statement in statements if not _is_in(statement.value, text)]
        are_tools_missing = bool(tool_marks)
    else:
        printed = set(_MARK.findall(rendered.casefold()))
        missing = [statement for statement in statements if statement.mark not in printed]
        are_tools_missing = bool(tool_marks) and printed.isdisjoint(tool_marks)
    if not missing and not are_tools_missing:
        return
    original = render(conversation, checks)  # `text` may have the time in it
    without_tools = {**conversation, "tools": None}
    if are_tools_missing and _try_to_render(without_tools, render, checks) == original:
        raise RequestError("the model's chat template does not print tools", hint=_TOOL_HINT, argument="tools")
    for statement in missing:
        changed = _with_marks(conversation, [statement], [])
        if _try_to_render(changed, render, checks) == original:
            message = conversation["messages"][statement.path[1]]
            problem = f"the model's chat template does not print {statement.name}"
            role = f"role {shown(message['role'])}"
            raise RequestError(problem, found=role, hint=statement.hint, argument="messages")


def _try_to_render(conversation: Conversation, render: Render, budget: Budget) -> str | None:
    """Render a conversation; return None if the template refuses it or fails, which means that it depends on what was
    changed."""
    try:
        return render(conversation, budget)
    except (RequestError, CheckpointError):
        if budget.spent:
            raise
        return None


def _is_in(value: object, text: str) -> bool:
    return isinstance(value, str) and value.strip().casefold() in text.casefold()


def _statements(conversation: Conversation, text: str) -> list[_Statement]:
    """List what the messages of a conversation say."""
    marks = _marks(conversation, text, "said")
    statements = []

    def add(path: tuple[str | int, ...], value: object, hint: str) -> None:
        is_blank = value in (None, [], {}) or (isinstance(value, str) and not value.strip())
        if not is_blank:
            statements.append(_Statement(path=path, value=value, mark=next(marks), hint=hint))

    for index, message in enumerate(conversation["messages"]):
        path = ("messages", index)
        calls = _calls(message)
        for call_path, call in calls:
            for key in ("name", "arguments"):
                add((*path, *call_path, key), call.get(key), _CALLS_HINT)
        if calls:
            continue
        content = message.get("content")
        if _is_text_parts(content):
            for number, part in enumerate(content):
                add((*path, "content", number, "text"), part["text"], _MESSAGE_HINT)
        else:
            add((*path, "content"), content, _MESSAGE_HINT)
        for key in _SAID_ELSEWHERE:
            add((*path, key), message.get(key), _MESSAGE_HINT)
    return statements


def _calls(message: Mapping[str, Any]) -> list[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """List the functions that a message calls, with their paths in it: as OpenAI has them today, as it had them before
    (``function_call``), and without ``function``, as data sets have them."""
    calls: list[tuple[tuple[str | int, ...], dict[str, Any]]] = []
    tool_calls = message.get("tool_calls")
    for number, call in enumerate(tool_calls if isinstance(tool_calls, list) else []):
        if not isinstance(call, dict):
            continue
        path: tuple[str | int, ...] = ("tool_calls", number)
        function = call
        if isinstance(call.get("function"), dict):
            path = (*path, "function")
            function = call["function"]
        if str(function.get("name")) in str(call.get("id")):
            # Kimi K2's template prints the id in place of the name: functions.NAME:0
            function = {**function, "name": None}
        calls.append((path, function))
    if isinstance(message.get("function_call"), dict):
        calls.append((("function_call",), message["function_call"]))
    return calls


def _is_text_parts(content: object) -> bool:
    """Whether a content is a list of texts, and not what a tool returned."""
    if not isinstance(content, list) or not content:
        return False
    return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)


def _tool_marks(conversation: Conversation, text: str) -> list[str]:
    tools = conversation["tools"] or []
    return list(itertools.islice(_marks(conversation, text, "tool"), len(tools)))


def _marks(conversation: Conversation, text: str, kind: Literal["said", "tool"]) -> Iterator[str]:
    """Make words that are not in a conversation or its prompt, none of which is part of another.

    They have letters and digits only, as templates may write contents in JSON.
    """
    known = (repr(conversation) + text).casefold()
    prefixes = (f"{kind}{number}n" for number in itertools.count())
    prefix = next(prefix for prefix in prefixes if prefix not in known)
    return (f"{prefix}{number}e" for number in itertools.count())


def _with_marks(
    conversation: Conversation, statements: Sequence[_Statement], tool_marks: Sequence[str]
) -> Conversation:
    """Copy a conversation with the marks of statements in their places, and those of tools as their descriptions."""
    copied: Conversation = _as_lists(conversation)
    for statement in statements:
        *parents, last = statement.path
        holder: Any = copied
        for key in parents:
            holder = holder[key]
        holder[last] = statement.marked
    for tool, mark in zip(copied["tools"] or [], tool_marks, strict=False):
        function = tool.get("function")
        described = function if isinstance(function, dict) else tool
        described["description"] = mark
    return copied


def _as_lists(value: Any) -> Any:
    """Copy nested values as dicts and lists, whose items can be replaced."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    return value
