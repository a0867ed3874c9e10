"""Encode conversations as the tokens that an instruct model was trained to continue: by a folder's
template, or by the formats of Meta's folders, which do not state whether a model is a base or an
instruct model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quantkit.base.arguments import as_path, as_string, require_tokenizer, wrong_type
from quantkit.base.json_values import format_value
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.errors import RequestError
from quantkit.text.chat_template import (
    META_FORMATS,
    ChatMessage,
    ChatTemplate,
    ChatTemplates,
    read_named_template,
)
from quantkit.text.message_trace import Conversation, require_traces
from quantkit.text.special_tokens import special_tokens
from quantkit.text.template_process import Budget
from quantkit.text.text_folder import locate_or_extract_text_folder
from quantkit.text.tokenizer import Tokenizer, prompt_start

if TYPE_CHECKING:
    from quantkit.text import end_tokens
else:
    end_tokens = LateModule("quantkit.text.end_tokens")

_LLAMA3_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_TOOL_ROLES = ("tool", "ipython", "function")
_SAYING_ROLES = ("user", "system", "developer", "tool")
_MESSAGE = '{"role": "user", "content": "..."}'
_HINTS = {"reasoning_effort"}
"""Variables without which an answer is none the worse: formats that do not know them ignore
them, as templates do.
"""
_LLAMA2_TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")


class Chat(Protocol):
    """A format of conversations."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Return the tokens that end an answer in this format, in addition to the model's EOS
        tokens.
        """
        ...

    def encode(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Encode a conversation as the token ids that the model continues with an answer.

        Args:
            messages: in order; the last one is to be answered.
            tools: that the model may call, as JSON schemas.
            variables: further variables of a template.

        Raises:
            RequestError: for a conversation that the format does not support.
        """
        ...


class TemplateChat:
    """A Jinja template, with the same tokens as ``transformers.apply_chat_template``."""

    def __init__(
        self,
        choose: Callable[[bool], ChatTemplate],
        tokenizer: Tokenizer,
        names: Mapping[str, str | None] | None = None,
    ) -> None:
        """
        Args:
            choose: returns the template; its argument is whether there are tools.
            tokenizer: of the model.
            names: spellings of special tokens by their names in templates.
        """
        self._choose = choose
        self._tokenizer = tokenizer
        self._names = names or {}

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Find the token that the template puts after an answer, if the tokenizer's EOS is
        another one.
        """
        end = end_tokens.find_answer_end(
            self.source(with_tools=False),
            names=self._names,
            specials=self._tokenizer.special_tokens or {},
            ends=self._tokenizer.eos_ids,
        )
        if end is None:
            return ()
        return (end,)

    @property
    def start(self) -> str:
        """Spell what a prompt begins with; empty if the tokenizer adds nothing, or no text
        spells it.
        """
        spellings: dict[int, str] = {}
        for spelling, number in (self._tokenizer.special_tokens or {}).items():
            spellings[number] = spelling
        start = ""
        for number in prompt_start(self._tokenizer):
            start += spellings.get(number, "")
        return start

    def source(self, *, with_tools: bool) -> str:
        """Return the template in Jinja, for conversations with or without tools."""
        return self._choose(with_tools).source

    def text(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        budget: Budget | None = None,
        **variables: Any,
    ) -> str:
        """Render the text whose tokens `encode` returns.

        A ``developer`` message is a ``system`` message for a template that does not have that role.
        If the template refuses a conversation or drops something of it, it gets other spellings of
        the same conversation; see `_respell_conversation`.

        Args:
            messages: in order; the last one is to be answered.
            tools: that the model may call, as JSON schemas.
            budget: of CPU time, shared by several conversations; None for a separate one.
            variables: further variables of the template.

        Raises:
            RequestError: for a conversation that the template refuses, or of which something does
                not reach the prompt.
            CheckpointError: if the template fails for any conversation, or exceeds its limits.
        """
        _require_messages(messages)
        # A template would print nothing in its place.
        for message in messages:
            is_from_user = isinstance(message, Mapping) and message.get("role") in _SAYING_ROLES
            if is_from_user and message.get("content") is None:
                raise RequestError(
                    "a message has no content", found=format_value(message), expected=_MESSAGE
                )
        template = self._choose(tools is not None)
        if variables.get("documents") and not template.reads_documents:
            raise RequestError(
                "the model's chat template does not print documents",
                hint="put them in a message",
                argument="chat_template_kwargs",
            )
        if variables.get("continue_final_message"):
            _require_nothing_after(messages[-1:], variables["continue_final_message"])
        if not template.knows_developer:
            messages = [_with_system_role(message) for message in messages]
        trace_variables = variables
        # The template has printed the last message, which was cut here.
        if variables.get("continue_final_message"):
            trace_variables = {
                **variables,
                "continue_final_message": False,
                "add_generation_prompt": False,
            }

        def render(conversation: Conversation, budget: Budget) -> str:
            template = self._choose(conversation["tools"] is not None)
            return template.render(
                conversation["messages"],
                tools=conversation["tools"],
                budget=budget,
                **trace_variables,
            )

        budget = budget or Budget()
        failure: RequestError | None = None
        loss: RequestError | None = None
        # The first spelling that the template accepts and prints completely is the prompt.
        for chat in _respell_conversation(messages, keep_parts=template.reads_parts):
            try:
                text = template.render(chat, tools=tools, budget=budget, **variables)
            except RequestError as error:
                failure = error
                continue
            try:
                require_traces(
                    {"messages": chat, "tools": tools}, text=text, render=render, budget=budget
                )
            except RequestError as error:
                loss = loss or error
                continue
            return text
        # What is lost says more than how another spelling fails.
        refusal = loss or failure
        assert refusal is not None
        raise refusal

    def encode(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        # The template spells BOS itself, if the model has it.
        return self._tokenizer.encode(
            self.text(messages, tools=tools, **variables), specials=True, bos=False
        )


class Llama2Chat:
    """Llama 2's instruct format: each question with its answer between BOS and EOS, tags as
    plain text.
    """

    end_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        _require_plain("llama2", messages, tools, variables)
        if (tag := llama2_tag(messages)) is not None:
            raise RequestError(
                "a message holds a tag of the chat format", found=tag, hint="leave it out"
            )
        roles: list[str] = []
        contents: list[str] = []
        for message in messages:
            roles.append(_plain_role(message))
            contents.append(message_text(message))
        # The format has no system turn: the system prompt is a part of the first question.
        if len(roles) > 1 and roles[0] == "system":
            system = contents[0]
            roles = roles[1:]
            contents = [f"<<SYS>>\n{system}\n<</SYS>>\n\n{contents[1]}", *contents[2:]]
        expected = ["user", "assistant"] * len(roles)
        if len(roles) % 2 == 0 or roles != expected[: len(roles)]:
            raise RequestError(
                "llama2 has at most one system message, then user and assistant in turn, the user"
                " last",
                found=", ".join(str(message["role"]) for message in messages) or "no message",
            )
        ids: list[int] = []
        # The last content is the question to answer; questions and answers alternate before it.
        for question, answer in zip(contents[:-1:2], contents[1::2], strict=True):
            ids += self._begin_turn(f"[INST] {question.strip()} [/INST] {answer.strip()} ")
            ids += self._tokenizer.eos_ids[:1]
        return [*ids, *self._begin_turn(f"[INST] {contents[-1].strip()} [/INST]")]

    def _begin_turn(self, text: str) -> list[int]:
        """Encode a turn, which begins with BOS in this format, whether or not the tokenizer adds
        it to other text.
        """
        if self._tokenizer.bos_id is None:
            bos = []
        else:
            bos = [self._tokenizer.bos_id]
        return [*bos, *self._tokenizer.encode(text, bos=False)]


def llama2_tag(messages: Sequence[ChatMessage]) -> str | None:
    """Find a tag of Llama 2's format in the messages, which must not contain one; raises
    `RequestError` for an invalid message.
    """
    # Tags are plain text in this format, so a message with tags could imitate another turn.
    # An invalid message is an error even if an earlier message has a tag.
    texts = [message_text(message) for message in messages]
    for text in texts:
        for tag in _LLAMA2_TAGS:
            if tag in text:
                return tag
    return None


class Llama3Chat:
    """Llama 3's instruct format: a header with the role before each message, contents never read
    as special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        specials = tokenizer.special_tokens or {}
        self._tokenizer = tokenizer
        try:
            self._header = specials["<|start_header_id|>"]
            self._content = specials["<|end_header_id|>"]
            self._end = specials["<|eot_id|>"]
        except KeyError as error:
            raise RequestError(
                f"the tokenizer has no {error.args[0]}; it is not Llama 3's"
            ) from error
        end_ids: list[int] = []
        for name in _LLAMA3_ENDS:
            if name in specials:
                end_ids.append(specials[name])
        self.end_ids: tuple[int, ...] = tuple(end_ids)

    def encode(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        _require_plain("llama3", messages, tools, variables)
        if not messages:
            raise RequestError(
                "a chat needs messages", expected='[{"role": "user", "content": "..."}]'
            )
        if self._tokenizer.bos_id is None:
            ids = []
        else:
            ids = [self._tokenizer.bos_id]
        for message in messages:
            content = message_text(message).strip()
            # Role and content are encoded as plain text, so that they never become special tokens.
            ids += [*self._encode_header(_plain_role(message)), *self._plain(content), self._end]
        return [*ids, *self._encode_header("assistant")]

    def _encode_header(self, role: str) -> list[int]:
        return [self._header, *self._plain(role), self._content, *self._plain("\n\n")]

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False)


def chat_format(
    folder: str | Path,
    tokenizer: Tokenizer,
    template: Literal["llama2", "llama3"] | str | None = None,
) -> Chat:
    """Choose the chat format of the model in a folder, whose `encode` returns the tokens of a
    conversation.

    Args:
        folder: of the model.
        tokenizer: the model's.
        template: ``llama2`` or ``llama3``; the name of one of the folder's templates; or a file
            ``*.jinja``. None is the folder's default.

    Raises:
        RequestError: if the folder has no template, and none is named.
        CheckpointError: if its template is damaged.

    Example:
        >>> model, tokenizer = quantkit.load("model")
        >>> chat = quantkit.chat_format("model", tokenizer)
        >>> ids = chat.encode([{"role": "user", "content": "What is the capital of France?"}])
    """
    model_path = as_path("folder", folder)
    require_tokenizer(tokenizer)
    if template is not None:
        as_string("template", template)
    if template == "llama2":
        return Llama2Chat(tokenizer)
    if template == "llama3":
        return Llama3Chat(tokenizer)
    return template_chat(model_path, tokenizer, template)


def template_chat(
    model_path: Path, tokenizer: Tokenizer, template: str | None = None
) -> TemplateChat:
    """Do the work of `chat_format` for a template in Jinja."""
    folder = locate_or_extract_text_folder(model_path)
    specials = tokenizer.special_tokens or {}
    spellings = {number: spelling for spelling, number in specials.items()}
    bos_eos_ids = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    tokens: dict[str, str | None] = {}
    for name, number in bos_eos_ids.items():
        if number is not None and number in spellings:
            tokens[name] = spellings[number]
    # What the folder's files state replaces what the tokenizer knows.
    tokens |= special_tokens(folder, specials)
    if template is not None and template.endswith(".jinja"):
        chosen = ChatTemplate(read_named_template(template), tokens=tokens, path=Path(template))
        return TemplateChat(lambda with_tools: chosen, _require_specials(tokenizer, folder), tokens)
    templates = ChatTemplates(model_path, tokens)
    if not templates:
        raise RequestError(
            "has no chat template",
            path=model_path,
            hint="use a prompt with a base model",
            expected=Message(
                Option("template", metavar=" or ".join(META_FORMATS)), " for an instruct model"
            ),
        )
    # Both are chosen here, so that an error in either is raised before the first conversation.
    templates_by_tools = {
        False: templates.choose(template, with_tools=False),
        True: templates.choose(template, with_tools=True),
    }
    return TemplateChat(
        templates_by_tools.__getitem__, _require_specials(tokenizer, folder), tokens
    )


def _require_specials(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """Require a tokenizer that reads special tokens from text, as templates spell them."""
    if tokenizer.special_tokens is None:
        raise RequestError(
            f"a template cannot spell special tokens for a tokenizer of {tokenizer.kind}",
            path=folder,
            expected=Message(
                Option("template", value=META_FORMATS[0]), ", or the model in a Hugging Face folder"
            ),
        )
    return tokenizer


def message_text(message: ChatMessage) -> str:
    """Check a message and read its content, for formats that are not templates.

    Raises:
        RequestError: if the message has no role, its content is not text, or it calls tools.
    """
    if isinstance(message, Mapping):
        for key in ("tool_calls", "function_call"):
            if message.get(key):
                raise RequestError(
                    f"this format does not support tools, but a message has '{key}'",
                    found=format_value(message[key]),
                )
    if isinstance(message, Mapping):
        content = _with_text(message).get("content")
    else:
        content = None
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise RequestError(
            "a message is an object with a role and a content",
            found=format_value(message),
            expected=_MESSAGE,
        )
    return content


def _with_text(message: ChatMessage, *, keep_parts: bool = False) -> ChatMessage:
    """Replace a message's content by a string if it is a list of text parts, which newlines join,
    as in vLLM, or the null of an answer without tool calls. Other messages, and with `keep_parts`
    lists, stay as they are.

    Raises:
        RequestError: for a part that is not text.
    """
    if not isinstance(message, Mapping) or "content" not in message:
        return message
    content = message["content"]
    role = message.get("role")
    if content is None and role == "assistant" and not message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(content, list | tuple):
        return message
    # A list that is not one of typed parts is a tool's result in JSON.
    if role in _TOOL_ROLES and not _has_typed_parts(content):
        return message
    # This rejects parts that are not text, also if the list is kept.
    texts = [_part_text(part) for part in content]
    if keep_parts:
        return message
    return {**message, "content": "\n".join(texts)}


def _has_typed_parts(content: Sequence[object]) -> bool:
    return all(isinstance(part, Mapping) and "type" in part for part in content)


def _with_system_role(message: ChatMessage) -> ChatMessage:
    """Replace OpenAI's newer name of the system role."""
    if isinstance(message, Mapping) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


def _respell_conversation(
    messages: Sequence[ChatMessage], *, keep_parts: bool
) -> Iterator[list[ChatMessage]]:
    """Yield a conversation as the template should have it, and then as other templates need it.

    - A message that only calls tools has no content, as in transformers, or the empty string, as in
      vLLM.
    - Parts of text are a string, as for templates that do not read them. Templates of Gemma 3 and
      Llama 4 loop over the parts of the user's messages, but print the first part of the system
      message only.
    - Arguments of calls are objects, as in transformers, or JSON, which DeepSeek V3.1's template
      appends to a string.

    Args:
        keep_parts: whether lists of text parts stay as they are at first.
    """
    chat = [_with_text(message, keep_parts=keep_parts) for message in messages]
    yield chat
    for respell in (_with_content, _with_text, _with_json_arguments):
        respelled = [respell(message) for message in chat]
        if respelled != chat:
            chat = respelled
            yield chat


def _require_nothing_after(last: Sequence[ChatMessage], continued: object) -> None:
    """Require that a message which is continued says nothing after the field that is continued.

    Args:
        last: the message, if there is one.
        continued: the name of the field; True is ``content``.

    Raises:
        RequestError: if it does, since the prompt ends before it.
    """
    if isinstance(continued, str):
        field = continued
    else:
        field = "content"
    # Templates print these after the content, and the content after the reasoning.
    later = ["tool_calls", "function_call"]
    if field != "content":
        later.append("content")
    for message in last:
        # The rendering of the template reports these.
        if not isinstance(message, Mapping) or message.get(field) is None:
            continue
        for key in later:
            if message.get(key):
                problem = f"the prompt would end before '{key}' of the message that is continued"
                raise RequestError(
                    problem,
                    hint="leave it out, or do not continue the message",
                    argument="messages",
                )


def _with_json_arguments(message: ChatMessage) -> ChatMessage:
    """Write the arguments of a message's calls as JSON."""
    if isinstance(message, Mapping):
        calls = message.get("tool_calls")
    else:
        calls = None
    if not isinstance(calls, list | tuple):
        return message
    respelled = []
    for call in calls:
        if isinstance(call, Mapping):
            function = call.get("function")
        else:
            function = None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": arguments}}
        respelled.append(call)
    return {**message, "tool_calls": respelled}


def _with_content(message: ChatMessage) -> ChatMessage:
    """Add the empty string as the content of a message that only calls tools."""
    if (
        isinstance(message, Mapping)
        and message.get("tool_calls")
        and message.get("content") is None
    ):
        return {**message, "content": ""}
    return message


def _plain_role(message: ChatMessage) -> str:
    return str(_with_system_role(message)["role"])


def _part_text(part: object) -> str:
    kind = None
    text = None
    if isinstance(part, Mapping):
        kind = part.get("type")
        text = part.get("text")
    # A part without a type counts as text.
    if kind not in (None, "text"):
        raise RequestError(
            f"message parts of type {format_value(kind)} are not supported",
            expected="only parts of type 'text'",
        )
    if not isinstance(text, str):
        problem = "a part of a message has no text"
        expected = '{"type": "text", "text": "..."}'
        raise RequestError(problem, found=format_value(part), expected=expected)
    return text


def _require_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise wrong_type("messages", messages, '[{"role": "user", "content": "..."}]')


def _require_plain(
    name: str, messages: object, tools: object, variables: Mapping[str, Any]
) -> None:
    _require_messages(messages)
    if tools is not None or variables.keys() - _HINTS:
        raise RequestError(f"the format {name} supports neither tools nor variables")
