"""Render conversations by chat templates, as the text that an instruct model was trained to
continue.

A Hugging Face folder has its own template in Jinja, which is untrusted code: it runs in a separate
process, see `template_process`.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.base.arguments import wrong_type
from quantkit.base.json_values import format_value, read_json, require_plain_file
from quantkit.base.late import LateModule
from quantkit.base.messages import Message, Option
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.text.text_folder import locate_or_extract_text_folder

if TYPE_CHECKING:
    from quantkit.text import template_process
else:
    template_process = LateModule("quantkit.text.template_process")

ChatMessage = Mapping[str, Any]
"""``role`` and ``content``, and further fields that a template uses, such as ``tool_calls``."""

_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
OLD_TEMPLATE_FILE = "chat_template.json"
ADDITIONAL_TEMPLATES = "additional_chat_templates"
_SUFFIX = ".jinja"
META_FORMATS = ("llama2", "llama3")
# An unknown spelling must not be printed as nothing.
_REQUIRED = ("bos_token", "eos_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning, of which templates use one."""
_MAX_REASON = 300
_LOOP_OVER_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+[\w.\[\]'"()]*\bcontent['")\]]*[\s%-]""")
_DEVELOPER = re.compile("""[\"']developer["']""")
_PROBE: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


class ChatTemplate:
    """A template, ready to render conversations."""

    def __init__(
        self,
        source: str,
        *,
        tokens: Mapping[str, str | None] | None = None,
        path: Path | None = None,
    ) -> None:
        """
        Args:
            source: in Jinja.
            tokens: spellings of special tokens by their names in templates, such as ``bos_token``;
                None for one that the model does not have, which is printed as nothing.
            path: of its file, for errors.

        Raises:
            CheckpointError: if it is not a valid template.
        """
        self.source = source
        self._tokens = dict(tokens or {})
        self._path = path
        if problem := template_process.check_template(source):
            raise CheckpointError(
                f"is not a valid Jinja chat template: {_short(problem)}", path=path
            )

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        budget: template_process.Budget | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation as text.

        Args:
            messages: in order.
            tools: that the model may call, as JSON schemas.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: end within the last message, for the model to continue it; the
                name of one of its fields, such as ``reasoning_content``, ends within that field
                instead of ``content``.
            budget: shared by several renderings; None for a separate one.
            variables: further variables of the template, such as ``enable_thinking``.

        Raises:
            RequestError: if a message has no role, the template refuses the conversation or fails
                only for it, or the last message cannot be continued.
            CheckpointError: if the template fails for any conversation, or exceeds its limits.
        """
        chat = _normalize_chat(messages)
        if tools is not None and not _are_schemas(tools):
            raise wrong_type("tools", tools, "a list of JSON schemas")
        partial = None
        if continue_final_message:
            if isinstance(continue_final_message, str):
                field = continue_final_message
            else:
                field = "content"
            partial = _PartialMessage(chat, field, self.source)
            # The prompt ends within the last message, where no answer begins.
            add_generation_prompt = False
        budget = budget or template_process.Budget()
        if tools is None:
            schemas = None
        else:
            schemas = [dict(tool) for tool in tools]
        variables = {"tools": schemas, **variables, "add_generation_prompt": add_generation_prompt}
        answer = self._answer(chat, budget, variables)
        if "error" in answer:
            kind = answer["error"]
            # A template that renders the simplest conversation fails because of this one. The probe
            # comes last, as it is another rendering.
            if kind == "failure" and not budget.spent and self._renders_probe:
                kind = "conversation"
            raise self._error(kind, _short(answer["reason"]))
        text = str(answer["text"])
        if partial is None:
            return text
        return partial.cut(text)

    @cached_property
    def reads_parts(self) -> bool:
        """Return whether the template loops over the parts of a message's content, by its source;
        others need a string.
        """
        return _LOOP_OVER_PARTS.search(self.source) is not None

    @cached_property
    def knows_developer(self) -> bool:
        """Return whether the template has OpenAI's role ``developer``, by its source. Many print
        any role, also those that the model has never seen.
        """
        return _DEVELOPER.search(self.source) is not None

    @property
    def reads_documents(self) -> bool:
        """Return whether the template reads the documents that a question is about, by its
        source.
        """
        return "documents" in self.source

    @cached_property
    def _renders_probe(self) -> bool:
        """Try out whether the template renders, or refuses, the simplest conversation: its failures
        are then due to others.
        """
        variables = {"tools": None, "add_generation_prompt": True}
        answer = self._answer(_PROBE, template_process.Budget(), variables)
        return answer.get("error") != "failure"

    def _answer(
        self,
        chat: list[dict[str, Any]],
        budget: template_process.Budget,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        # In a template, a token that the model does not have is an undefined variable.
        tokens: dict[str, str] = {}
        for name, spelling in self._tokens.items():
            if spelling is not None:
                tokens[name] = spelling
        unknown: list[str] = []
        for name in _REQUIRED:
            if name not in self._tokens and name not in variables:
                unknown.append(name)
        return template_process.render(
            self.source,
            {"documents": None, **tokens, **variables, "messages": chat},
            tuple(unknown),
            budget,
        )

    def _error(self, kind: str, reason: str) -> QuantkitError:
        """Build the error for a failed rendering; a refusal concerns the conversation."""
        if kind == "refusal":
            return RequestError(f"the chat template rejects the input: {reason}", path=self._path)
        if kind == "conversation":
            return RequestError(
                f"the chat template fails for this conversation: {reason}", path=self._path
            )
        if kind == "length":
            return RequestError("the chat template's result is too long", path=self._path)
        if kind == "token":
            return CheckpointError(
                f"the chat template prints {reason}, which no file of the model spells",
                path=self._path,
                expected=f'"{reason}" in tokenizer_config.json, null if there is none',
            )
        return CheckpointError(f"the chat template fails: {reason}", path=self._path)


def _are_schemas(tools: object) -> bool:
    return isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)


def _short(reason: str) -> str:
    return textwrap.shorten(reason, _MAX_REASON, placeholder=" ...")


class ChatTemplates:
    """The templates of a folder, by name; ``default`` is for all that have no name."""

    def __init__(self, folder: str | Path, tokens: Mapping[str, str | None] | None = None) -> None:
        """Read a folder's templates; `tokens` are as for `ChatTemplate`. Raises `CheckpointError`
        if a file is damaged.
        """
        # The path as the caller gave it, which errors name.
        self.folder = Path(folder)
        self._sources = _read_sources(locate_or_extract_text_folder(folder))
        self._tokens = dict(tokens or {})

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def sources(self) -> dict[str, str]:
        """Return all templates, by name."""
        return {name: source for name, (_, source) in self._sources.items()}

    def choose(self, name: str | None = None, *, with_tools: bool = False) -> ChatTemplate:
        """Compile the template of a name; None is ``tool_use`` if it exists and there are tools,
        otherwise ``default``. Raises `RequestError` if there is no such template.
        """
        if name:
            chosen = name
        elif with_tools and "tool_use" in self._sources:
            chosen = "tool_use"
        else:
            chosen = "default"
        if name is None and chosen not in self._sources and self._sources:
            raise RequestError(
                "has several chat templates, but no default",
                path=self.folder,
                found=", ".join(map(repr, self._sources)),
                hint=Message("name one of them as ", Option("template")),
            )
        if chosen not in self._sources:
            raise RequestError(
                "has no chat template" if name is None else f"has no chat template '{name}'",
                path=self.folder,
                found=", ".join(self._sources) or None,
                hint=Message("a base model has none; use a prompt, or name a ", Option("template")),
            )
        path, source = self._sources[chosen]
        return ChatTemplate(source, tokens=self._tokens, path=path)


def template_paths(folder: Path) -> list[Path]:
    """List the files of a folder that contain only a template."""
    paths = [
        folder / TEMPLATE_FILE,
        folder / OLD_TEMPLATE_FILE,
        *sorted((folder / ADDITIONAL_TEMPLATES).glob(f"*{_SUFFIX}")),
    ]
    return [path for path in paths if path.is_file()]


def read_named_template(template: str) -> str:
    """Read the source of a template by name: ``llama2``, ``llama3``, or a file ``*.jinja``.
    Raises `RequestError` for another name or a file that does not exist, `CheckpointError` if it
    cannot be read.
    """
    if template in META_FORMATS:
        return (
            resources.files("quantkit.text")
            .joinpath(f"templates/{template}{_SUFFIX}")
            .read_text(encoding="utf-8")
        )
    if not template.endswith(_SUFFIX):
        raise RequestError(
            "no such chat template",
            found=format_value(template),
            expected=f"{', '.join(META_FORMATS)} or a file *{_SUFFIX}",
        )
    path = Path(template)
    if not os.path.exists(path):
        raise RequestError("the chat template does not exist", path=path)
    source = _read(path)
    # This raises an error if Jinja does not compile it.
    ChatTemplate(source, path=path)
    return source


def _read_sources(folder: Path) -> dict[str, tuple[Path, str]]:
    """Read the path and the source of each template by name: separate files win over the
    tokenizer's config, as in transformers.
    """
    sources: dict[str, tuple[Path, str]] = {}
    path = folder / TEMPLATE_FILE
    if path.is_file():
        sources["default"] = path, _read(path)
    # The order of files in a folder depends on the system.
    for path in sorted((folder / ADDITIONAL_TEMPLATES).glob(f"*{_SUFFIX}")):
        sources[path.stem] = path, _read(path)
    if sources:
        return sources
    # Old multimodal processors saved their template in the second file.
    for path in (folder / _CONFIG, folder / OLD_TEMPLATE_FILE):
        if not path.is_file():
            continue
        value = read_json(path).get("chat_template")
        if value is not None:
            return _parse_listed_templates(value, path)
    return {}


def _parse_listed_templates(value: object, path: Path) -> dict[str, tuple[Path, str]]:
    """Check the value of ``chat_template`` in a JSON file: the default template, or a list of
    named ones.
    """
    if isinstance(value, str):
        value = [{"name": "default", "template": value}]
    if not isinstance(value, list):
        raise CheckpointError("has a chat template that is not a string", path=path)
    sources: dict[str, tuple[Path, str]] = {}
    for entry in value:
        name = None
        source = None
        if isinstance(entry, dict):
            name = entry.get("name")
            source = entry.get("template")
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError("lists a chat template without a name or source", path=path)
        sources[name] = path, _normalize_newlines(source, path)
    return sources


def _normalize_newlines(source: str, path: Path) -> str:
    """Convert the newlines of a template from JSON to those of a text file, as Jinja expects
    them.
    """
    # JSON can escape a lone surrogate, which no text has.
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError("has a chat template that is not valid Unicode", path=path) from error
    return source.replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path) -> str:
    require_plain_file(path)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read as UTF-8: {error}", path=path) from error
    if not source.strip():
        # A model without a template has no such file: this one was lost, and every conversation
        # would render as "".
        raise CheckpointError("the file is empty", path=path, expected="a chat template")
    return source


def _normalize_chat(messages: Any) -> list[dict[str, Any]]:
    """Copy a conversation, as transformers passes it to templates: without nulls, and with the
    reasoning under all its names.
    """
    if not isinstance(messages, Sequence) or not messages:
        raise RequestError("a chat needs messages", expected='[{"role": "user", "content": "..."}]')
    chat = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                "a message is an object with a role",
                found=format_value(message),
                expected='{"role": "user", "content": "..."}',
            )
        try:
            fields: dict[str, Any] = {}
            for name, value in message.items():
                if value is not None:
                    fields[name] = copy.deepcopy(value)
        except RecursionError as error:
            raise RequestError(
                "a message is nested too deep", found=f"role {format_value(message['role'])}"
            ) from error
        reasoning = _find_reasoning(fields)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        chat.append(fields)
    return chat


def _find_reasoning(message: Mapping[str, Any]) -> Any:
    for name in _REASONING:
        if name in message:
            return message[name]
    return None


class _PartialMessage:
    """The last message of a conversation, which the model is to continue: its end is marked, and
    the text cut there.
    """

    def __init__(self, chat: list[dict[str, Any]], field: str, source: str) -> None:
        """Mark the end of a field of the last message of `chat`. Raises `RequestError` if the field
        is not a string, or the template, `source`, does not read it.
        """
        message = chat[-1]
        self._mark = _find_unused_mark(repr(chat))
        value = message.get(field)
        holder = message
        name = field
        if isinstance(value, (list, tuple)):
            # The message continues after the last part that is text.
            name = "text"
            holder = {}
            for part in value:
                if isinstance(part, dict) and "text" in part:
                    holder = part
        text = holder.get(name)
        if not isinstance(text, str):
            raise RequestError(
                "the last message has no string to continue", expected=f'a string as its "{field}"'
            )
        self._text = text
        # A template reads the reasoning under one of its names: all of them are marked.
        fields = [field]
        if field in _REASONING:
            fields = [alias for alias in _REASONING if message.get(alias) == value]
        if not any(alias in source for alias in fields):
            raise RequestError(
                f'the chat template does not read "{field}"; the last message cannot be continued'
            )
        # The space shows whether the template strips messages.
        marked_text = f"{self._text}{self._mark} "
        if holder is not message:
            holder[name] = marked_text
        else:
            for alias in fields:
                message[alias] = marked_text

    def cut(self, text: str) -> str:
        """Cut a rendered text before the mark. If the mark's space is missing, the template strips
        messages, and trailing spaces are stripped here too.
        """
        place = text.rfind(self._mark)
        # A template that prints the text changed, or twice, has no single place to continue at.
        if place < 0 or self._text.strip() not in text or self._mark in text[:place]:
            raise RequestError(
                "the chat template does not print the last message once and unchanged; it cannot be"
                " continued"
            )
        if text.startswith(f"{self._mark} ", place):
            return text[:place]
        return text[:place].rstrip()


def _find_unused_mark(text: str) -> str:
    for number in itertools.count():
        mark = f"GOES_ON_{number}"
        if mark not in text:
            break
    return mark
