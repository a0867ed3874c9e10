"""Conversations as text: through a model's chat template or, for a model without one, as plain
text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.base.json_values import format_value
from quantkit.errors import CheckpointError, RequestError
from quantkit.text.chat import TemplateChat, message_text, template_chat
from quantkit.text.chat_template import ChatMessage, ChatTemplates
from quantkit.text.template_process import Budget
from quantkit.text.tokenizer import Tokenizer

ModelChat = Callable[[], tuple[TemplateChat | None, list[str]]]
"""Returns a model's chat format, None if it has none that can be used, and notes."""

TEMPLATE_SECONDS = 60.0  # of a chat template for all conversations
_TOOLS = '[{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def model_chat(path: Path, tokenizer: Tokenizer) -> tuple[TemplateChat | None, list[str]]:
    """Return the chat format of a model, and a note if it has one that cannot be used; None for a
    base model.
    """
    try:
        if not ChatTemplates(path):
            return None, []
        return template_chat(path, tokenizer), []
    except (RequestError, CheckpointError) as error:
        problem = f"{error.path or path}: {error.problem.rstrip('.')}"
        return None, [f"{problem}; conversations are used as plain text"]


def render_conversation(
    messages: Sequence[ChatMessage],
    chat: TemplateChat | None,
    budget: Budget,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """Render a conversation, without the system message if the template has no system role.

    Args:
        messages: in the form of OpenAI or of ShareGPT.
        chat: None for a base model, which gets plain text.
        budget: the time that is left for all conversations.
        tools: that the model may call, as JSON schemas; a base model gets none.

    Raises:
        RequestError, CheckpointError: if the template refuses it or fails.
    """
    messages = [_message(message) for message in messages]
    if chat is None:
        return plain(messages)
    settings: dict[str, Any] = {"tools": tools, "add_generation_prompt": False, "budget": budget}
    try:
        return chat.text(messages, **settings)
    except (RequestError, CheckpointError):
        if not messages or messages[0].get("role") != "system":
            raise
        return chat.text(messages[1:], **settings)


def read_messages(value: object) -> list[ChatMessage] | None:
    """Return the messages in a value: a list of them, or its JSON in a string; None for any
    other value.
    """
    if isinstance(value, str) and looks_serialized(value):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value.removeprefix("\ufeff"))
        if not isinstance(value, list) or not all(map(_is_message, value)):
            return None
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return value
    return None


def read_tools(value: object) -> list[Mapping[str, object]] | None:
    """Return the tools next to a conversation: a list of JSON schemas, or its JSON in a string;
    None for no tools.

    Raises:
        RequestError: for anything else.
    """
    tools = value
    if isinstance(value, str) and value.strip():
        try:
            tools = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                "'tools' is not JSON", found=format_value(value), expected=_TOOLS
            ) from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(
            "'tools' is not a list of tools", found=format_value(value), expected=_TOOLS
        )
    return tools


def looks_serialized(text: str) -> bool:
    """Return whether a string is spelled like a list of objects, or like an object, in JSON or as
    Python prints them.
    """
    return re.fullmatch(r"\ufeff?\s*(\[\s*\{.*\]|\{\s*[\"'].*\})\s*", text, re.DOTALL) is not None


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def plain(messages: Sequence[ChatMessage]) -> str:
    """Return a conversation as plain text.

    Raises `RequestError` for a message without a role or a content in words.
    """
    texts = [message_text(message) for message in messages]
    return "\n\n".join(
        f"{message['role'].capitalize()}: {text}"
        for message, text in zip(messages, texts, strict=True)
    )


def _message(message: ChatMessage) -> ChatMessage:
    """Return a message; one in ShareGPT's form, ``from`` and ``value``, with the keys that
    templates read.
    """
    if "role" in message or "from" not in message:
        return message
    return {
        "role": _SHAREGPT_ROLES.get(str(message["from"]), message["from"]),
        "content": message.get("value"),
    }
