"""Check that everything a conversation says reaches the prompt.

A chat template drops a message without an error if it does not know the message's role, and it
drops tool calls if it was written for a model without tools. The model would then answer another
conversation.

The check renders the conversation once more with a mark in place of each statement, and searches
the result for the marks. Marks replace the statements instead of being added to them, because the
text is then short, and a template that trims or splits contents keeps a mark whole.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError, RequestError
from quantkit.text.template_process import Budget

Conversation = dict[str, Any]
"""``messages``, and ``tools`` or None."""

Render = Callable[[Conversation, Budget], str]
"""Renders a conversation with the same variables each time."""

_TOOL_HINT = "leave them out"
_MESSAGE_HINT = "leave it out, or give it a role that the chat template knows"
_CALLS_HINT = "leave out the call and its result, or use a model whose chat template has tools"
_MARK = re.compile(r"(?:said|tool)\d+n\d+e")
# Beside `content`; reasoning is not among them: templates drop that of earlier answers, or do not
# know it.
_SAID_ELSEWHERE = ("refusal", "audio")
# The last of a custom tool, which has no arguments.
_SAID_IN_CALLS = ("name", "arguments", "input")
_KINDS_OF_CALLS = ("function", "custom")

_Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _Statement:
    """Something that a message says.

    Attributes:
        path: keys and indices of its value in a conversation.
        value: what it is.
        mark: a word that is nowhere in the conversation.
        hint: what to do if the template drops it.
        identifier_path: of a call's identifier that has the value in it, which a template may print
            instead.
    """

    path: _Path
    value: object
    mark: str
    hint: str
    identifier_path: _Path | None = None

    @property
    def name(self) -> str:
        """Format its place in a request, such as ``messages[0].content``."""
        name = ""
        for key in self.path:
            if isinstance(key, int):
                name += f"[{key}]"
            else:
                name += f".{key}"
        return name.removeprefix(".")

    @property
    def mark_value(self) -> object:
        """Wrap the mark in a value of the same kind, which a template may require."""
        if isinstance(self.value, Mapping):
            return {self.mark: self.mark}
        if isinstance(self.value, list):
            return [self.mark]
        return self.mark


def require_traces(
    conversation: Conversation, *, text: str, render: Render, budget: Budget
) -> None:
    """Require that each statement of a conversation leaves a trace in its prompt.

    All is well with one more rendering. Only a statement whose mark is missing costs another one,
    in which nothing else is changed: a template may shorten or translate what it prints, as long as
    the prompt depends on it.

    Text next to tool calls may be missing if the calls are there: Llama 3's and gpt-oss's templates
    leave it out.

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
    # Results are compared with each other, so that dates and random choices must not differ.
    checks = Budget(seconds=budget.seconds, length=sys.maxsize, repeatable=True)
    try:
        _require_printed(plain, statements, text=text, render=render, checks=checks)
    finally:
        budget.seconds = checks.seconds


def _require_printed(
    conversation: Conversation,
    statements: Sequence[_Statement],
    *,
    text: str,
    render: Render,
    checks: Budget,
) -> None:
    tool_marks = _tool_marks(conversation, text)
    marked = _with_marks(conversation, statements, tool_marks)
    rendered = _try_to_render(marked, render, checks)
    if rendered is None:
        # The template requires something of the contents. Most statements can be found as they are.
        # A role may be the same word as a statement, so each occurrence is counted.
        spoken_texts: list[str] = []
        for message in conversation["messages"]:
            spoken_texts.append(str(message["role"]).casefold())
        for statement in statements:
            spoken_texts.append(str(statement.value).casefold())
        lowered_text = text.casefold()
        missing: list[_Statement] = []
        for statement in statements:
            if not _is_in(statement.value, lowered_text, spoken_texts):
                missing.append(statement)
        are_tools_missing = bool(tool_marks)
        missing_tools: list[int] = []
    else:
        # Templates may write words in capitals.
        printed = set(_MARK.findall(rendered.casefold()))
        missing = [statement for statement in statements if statement.mark not in printed]
        are_tools_missing = bool(tool_marks) and printed.isdisjoint(tool_marks)
        # Without any mark, the template prints tools without their descriptions.
        if are_tools_missing:
            missing_tools = []
        else:
            missing_tools = [i for i, mark in enumerate(tool_marks) if mark not in printed]
    if not missing and not are_tools_missing and not missing_tools:
        return
    # `text` may have the time in it, and the checks have a fixed date.
    original = render(conversation, checks)
    without_tools = {**conversation, "tools": None}
    if are_tools_missing and _try_to_render(without_tools, render, checks) == original:
        raise RequestError(
            "the model's chat template does not print tools", hint=_TOOL_HINT, argument="tools"
        )
    for index in missing_tools:
        tools = conversation["tools"][:index] + conversation["tools"][index + 1 :]
        if _try_to_render({**conversation, "tools": tools}, render, checks) == original:
            problem = f"the model's chat template does not print tools[{index}]"
            raise RequestError(problem, hint="leave it out", argument="tools")
    for statement in missing:
        changed = _with_marks(conversation, [statement], [])
        if _try_to_render(changed, render, checks) == original:
            # A statement's path begins with "messages" and the message's index.
            message = conversation["messages"][statement.path[1]]
            problem = f"the model's chat template does not print {statement.name}"
            role = f"role {format_value(message['role'])}"
            raise RequestError(problem, found=role, hint=statement.hint, argument="messages")


def _try_to_render(conversation: Conversation, render: Render, budget: Budget) -> str | None:
    """Render a conversation; return None if the template refuses it or fails, which means that it
    depends on what was changed.
    """
    try:
        return render(conversation, budget)
    except (RequestError, CheckpointError):
        if budget.spent:
            raise
        return None


def _is_in(value: object, text: str, said: Sequence[str]) -> bool:
    """Return whether a text has a value as often as it was said, also as a part of something else;
    all in small letters.
    """
    if not isinstance(value, str):
        return False
    word = value.strip().casefold()
    times_said = sum(said_text.count(word) for said_text in said)
    return text.count(word) >= times_said


def _statements(conversation: Conversation, text: str) -> list[_Statement]:
    """List what the messages of a conversation say."""
    marks = _marks(conversation, text, "said")
    statements = []

    def add(path: _Path, value: object, hint: str, identifier_path: _Path | None = None) -> None:
        if not _is_blank(value):
            mark = next(marks)
            statements.append(
                _Statement(
                    path=path, value=value, mark=mark, hint=hint, identifier_path=identifier_path
                )
            )

    for index, message in enumerate(conversation["messages"]):
        path = ("messages", index)
        num_before = len(statements)
        for call_path, call in _calls(message):
            _add_call((*path, *call_path), call, add)
        # Templates may leave out the text next to tool calls.
        if len(statements) > num_before:
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


def _is_blank(value: object) -> bool:
    return value in (None, [], {}) or (isinstance(value, str) and not value.strip())


def _calls(message: Mapping[str, Any]) -> list[tuple[_Path, object]]:
    """List the calls of a message, with their paths in it: as OpenAI has them today, and as it had
    them before (``function_call``). Data sets may have JSON in place of the list.
    """
    calls: list[tuple[_Path, object]] = []
    tool_calls = message.get("tool_calls")
    if isinstance(tool_calls, list):
        for number, call in enumerate(tool_calls):
            calls.append((("tool_calls", number), call))
    else:
        calls.append((("tool_calls",), tool_calls))
    calls.append((("function_call",), message.get("function_call")))
    return calls


def _add_call(path: _Path, call: object, add: Callable[..., None]) -> None:
    """Add what a call says: of a function, of a custom tool, or without ``function``, as data sets
    have it. Anything but an object is one statement.
    """
    if not isinstance(call, dict):
        add(path, call, _CALLS_HINT)
        return
    called = call
    called_path = path
    for kind in _KINDS_OF_CALLS:
        if isinstance(call.get(kind), dict):
            called = call[kind]
            called_path = (*path, kind)
            break
    for key in _SAID_IN_CALLS:
        value = called.get(key)
        identifier_path = None
        if key == "name" and isinstance(value, str) and value in str(call.get("id", "")):
            # Kimi K2's template prints it in place of the name: functions.NAME:0.
            identifier_path = (*path, "id")
        add((*called_path, key), value, _CALLS_HINT, identifier_path)


def _is_text_parts(content: object) -> bool:
    """Return whether a content is a list of texts, and not what a tool returned."""
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
    used_text = (repr(conversation) + text).casefold()
    for number in itertools.count():
        prefix = f"{kind}{number}n"
        if prefix not in used_text:
            break
    # The last letter ends the number, so that mark 1 is not a part of mark 10.
    return (f"{prefix}{number}e" for number in itertools.count())


def _with_marks(
    conversation: Conversation, statements: Sequence[_Statement], tool_marks: Sequence[str]
) -> Conversation:
    """Copy a conversation with the marks of statements in their places, and those of tools as
    their descriptions.
    """
    copied: Conversation = _as_lists(conversation)
    for statement in statements:
        holder, last = _find_holder(copied, statement.path)
        holder[last] = statement.mark_value
        if statement.identifier_path is not None:
            holder, last = _find_holder(copied, statement.identifier_path)
            holder[last] = str(holder[last]).replace(str(statement.value), statement.mark)
    for tool, mark in zip(copied["tools"] or [], tool_marks, strict=False):
        function = tool.get("function")
        # OpenAI's form has the description in `function`; others have it in the tool itself.
        if isinstance(function, dict):
            function["description"] = mark
        else:
            tool["description"] = mark
    return copied


def _find_holder(conversation: Conversation, path: _Path) -> tuple[Any, str | int]:
    """Find the dict or list that has the value at a path, and its key or index there."""
    *parents, last = path
    holder: Any = conversation
    for key in parents:
        holder = holder[key]
    return holder, last


def _as_lists(value: Any) -> Any:
    """Copy nested values as dicts and lists, whose items can be replaced."""
    if isinstance(value, Mapping):
        return {key: _as_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    return value
