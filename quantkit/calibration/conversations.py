"""Conversations as text: through a model's chat template or, for a model without one, as plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from quantkit.errors import CheckpointError, RequestError
from quantkit.text.chat import TemplateChat, message_text, template_chat
from quantkit.text.chat_template import ChatTemplates, Message
from quantkit.text.template_process import Budget
from quantkit.text.tokenizer import Tokenizer

ModelChat = Callable[[], tuple[TemplateChat | None, list[str]]]
"""Returns a model's chat format, None if it has none that can be used, and notes."""

TEMPLATE_SECONDS = 60.0  # of a chat template for all conversations
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


def model_chat(path: Path, tokenizer: Tokenizer) -> tuple[TemplateChat | None, list[str]]:
    """The chat format of a model, and a note if it has one that cannot be used; None for a base model."""
    try:
        if not ChatTemplates(path):
            return None, []
        return template_chat(path, tokenizer), []
    except (RequestError, CheckpointError) as error:
        problem = f"{error.path or path}: {error.problem.rstrip('.')}"
        return None, [f"{problem}; conversations are used as plain text"]


def rendered(messages: Sequence[Message], chat: TemplateChat | None, budget: Budget) -> str:
    """The text of a conversation, without the system message if the template has no system role.

    Raises:
        RequestError, CheckpointError: if the template refuses it or fails.
    """
    messages = [_message(one) for one in messages]
    if chat is None:
        return plain(messages)
    try:
        return chat.text(messages, add_generation_prompt=False, budget=budget)
    except (RequestError, CheckpointError):
        if not messages or messages[0].get("role") != "system":
            raise
        return chat.text(messages[1:], add_generation_prompt=False, budget=budget)


def plain(messages: Sequence[Message]) -> str:
    """A conversation as plain text. Raises `RequestError` for a message without a role or a content in words."""
    texts = [message_text(one) for one in messages]
    return "\n\n".join(f"{one['role'].capitalize()}: {text}" for one, text in zip(messages, texts, strict=True))


def _message(one: Message) -> Message:
    """A message; one in ShareGPT's form, ``from`` and ``value``, with the keys that templates read."""
    if "role" in one or "from" not in one:
        return one
    return {"role": _SHAREGPT_ROLES.get(str(one["from"]), one["from"]), "content": one.get("value")}
