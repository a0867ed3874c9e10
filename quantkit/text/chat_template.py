"""Chat templates: conversations to the text that an instruct model was trained to continue.

A Hugging Face folder brings its own template in Jinja, which is untrusted code: it runs in a process of its own, see
`template_process`.
"""

from __future__ import annotations

import copy
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from quantkit.arguments import wrong_type
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.json_values import read_json, require_plain_file, shown
from quantkit.text.template_process import Budget, check_template, render
from quantkit.text.text_folder import text_folder

Message = Mapping[str, Any]
"""``role`` and ``content``, and what a template knows besides, such as ``tool_calls``."""

_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
OLD_TEMPLATE_FILE = "chat_template.json"
_MORE = "additional_chat_templates"
_SUFFIX = ".jinja"
META_FORMATS = ("llama2", "llama3")
_REQUIRED = ("bos_token", "eos_token")  # in whose place a template must not print nothing unnoticed
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""What the thoughts before an answer are called: templates know one name or another."""
_MAX_REASON = 300


class ChatTemplate:
    """A template, ready to render conversations."""

    def __init__(
        self, source: str, *, tokens: Mapping[str, str | None] | None = None, path: Path | None = None
    ) -> None:
        """
        Args:
            source: in Jinja.
            tokens: spellings of special tokens by the names that templates use: ``bos_token`` and the like; None for
                one that the model does not have, and that a template prints nothing for.
            path: where it comes from, for errors.

        Raises:
            CheckpointError: if it is no template.
        """
        self.source = source
        self._tokens = dict(tokens or {})
        self._path = path
        if problem := check_template(source):
            raise CheckpointError(f"is no chat template that Jinja reads: {_short(problem)}", path=path)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        budget: Budget | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: in order.
            tools: that the model may call, as JSON schemas.
            add_generation_prompt: end with what begins an answer.
            continue_final_message: end in the midst of the last message, for the model to continue it; the name of
                one of its fields, such as ``reasoning_content``, ends within that instead of ``content``.
            budget: of all renderings that share it; None is that of one.
            variables: more that the template may read, such as ``enable_thinking``.

        Raises:
            RequestError: if a message has no role, the template refuses the conversation, or the last message cannot
                be continued.
            CheckpointError: if the template fails.
        """
        chat = _checked_chat(messages)
        given_tools = None if tools is None else _checked_tools(tools)
        begun = None
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            begun = _Begun(chat, field, self.source)
            add_generation_prompt = False
        tokens = {name: spelling for name, spelling in self._tokens.items() if spelling is not None}
        unknown = tuple(name for name in _REQUIRED if name not in self._tokens and name not in variables)
        given = {"tools": given_tools, "documents": None, **tokens, **variables}
        given |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        answer = render(self.source, given, unknown, budget or Budget())
        if "error" in answer:
            raise self._error(answer["error"], _short(answer["reason"]))
        text = str(answer["text"])
        return text if begun is None else begun.cut(text)

    def _error(self, kind: str, reason: str) -> QuantkitError:
        """The error for what went wrong in the template; a refusal concerns the conversation."""
        if kind == "refusal":
            return RequestError(f"the chat template refuses this: {reason}", path=self._path)
        if kind == "length":
            return RequestError("the chat template makes too long a text", path=self._path)
        if kind == "token":
            return CheckpointError(
                f"the chat template shows {reason}, which no file of the model spells", path=self._path,
                expected=f'"{reason}" in tokenizer_config.json, null if there is none',
            )  # fmt: skip
        return CheckpointError(f"the chat template fails: {reason}", path=self._path)


def _short(reason: str) -> str:
    return textwrap.shorten(reason, _MAX_REASON, placeholder=" ...")


class ChatTemplates:
    """The templates of a folder, by name; ``default`` is for all that is not named."""

    def __init__(self, folder: str | Path, tokens: Mapping[str, str | None] | None = None) -> None:
        """
        Args:
            tokens: as for `ChatTemplate`.

        Raises:
            CheckpointError: if a file is damaged.
        """
        self.folder = Path(folder)  # by its own name, which errors say
        self._sources = _sources(text_folder(folder))
        self._tokens = dict(tokens or {})

    def __bool__(self) -> bool:
        return bool(self._sources)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all there are."""
        return tuple(self._sources)

    @property
    def sources(self) -> dict[str, str]:
        """All there are, by name."""
        return {name: source for name, (_, source) in self._sources.items()}

    def choose(self, name: str | None = None, *, with_tools: bool = False) -> ChatTemplate:
        """One of them.

        Args:
            name: which; None is ``tool_use`` where tools are given and it is there, else ``default``.

        Raises:
            RequestError: if there is none of that name.
        """
        chosen = name or ("tool_use" if with_tools and "tool_use" in self._sources else "default")
        if name is None and chosen not in self._sources and self._sources:
            raise RequestError(
                "has chat templates, and none of them is the default", path=self.folder,
                found=", ".join(map(repr, self._sources)), hint="name one of them as `template`",
            )  # fmt: skip
        if chosen not in self._sources:
            raise RequestError(
                "has no chat template" if name is None else f"has no chat template '{name}'", path=self.folder,
                found=", ".join(self._sources) or None,
                hint="a base model has none; give it a prompt, or name a `template`",
            )  # fmt: skip
        path, source = self._sources[chosen]
        return ChatTemplate(source, tokens=self._tokens, path=path)


def template_paths(folder: Path) -> list[Path]:
    """The files of a folder that hold nothing but a template."""
    names = [folder / TEMPLATE_FILE, folder / OLD_TEMPLATE_FILE, *sorted((folder / _MORE).glob(f"*{_SUFFIX}"))]
    return [path for path in names if path.is_file()]


def given_template(template: str) -> str:
    """The source of a template that is asked for by name: ``llama2``, ``llama3``, or a file ``*.jinja``.

    Raises:
        RequestError: for another name.
        CheckpointError: if the file cannot be read.
    """
    if template in META_FORMATS:
        return resources.files("quantkit.text").joinpath(f"templates/{template}{_SUFFIX}").read_text(encoding="utf-8")
    if not template.endswith(_SUFFIX):
        raise RequestError(
            "no such chat template", found=shown(template), expected=f"{', '.join(META_FORMATS)} or a file *{_SUFFIX}"
        )
    source = _read(Path(template))
    ChatTemplate(source, path=Path(template))
    return source


def _sources(folder: Path) -> dict[str, tuple[Path, str]]:
    """Templates by name, and where they lie: files of their own win over the tokenizer's config, as in transformers."""
    found: dict[str, tuple[Path, str]] = {}
    if (path := folder / TEMPLATE_FILE).is_file():
        found["default"] = path, _read(path)
    for path in sorted((folder / _MORE).glob(f"*{_SUFFIX}")):
        found[path.stem] = path, _read(path)
    if found:
        return found
    for path in (folder / _CONFIG, folder / OLD_TEMPLATE_FILE):  # the latter was for processors of images and text
        value = read_json(path).get("chat_template") if path.is_file() else None
        if isinstance(value, str):
            return {"default": (path, _lines(value, path))}
        if isinstance(value, list):
            return {name: (path, _lines(source, path)) for name, source in (_named(one, path) for one in value)}
        if value is not None:
            raise CheckpointError("holds a chat template that is no text", path=path)
    return {}


def _lines(source: str, path: Path) -> str:
    """A template that stands in JSON, as one that is read from a file: Jinja knows one kind of new line."""
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError("holds a chat template that is not valid Unicode", path=path) from error
    return source.replace("\r\n", "\n").replace("\r", "\n")


def _named(value: Any, path: Path) -> tuple[str, str]:
    name, source = (value.get(key) if isinstance(value, dict) else None for key in ("name", "template"))
    if not isinstance(name, str) or not isinstance(source, str):
        raise CheckpointError("lists a chat template without a name or text", path=path)
    return name, source


def _read(path: Path) -> str:
    require_plain_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read as UTF-8: {error}", path=path) from error


def _checked_chat(messages: Any) -> list[dict[str, Any]]:
    """A copy of a conversation, as transformers gives it to templates: what is null is absent, and thoughts go by all
    their names."""
    if not isinstance(messages, Sequence) or not messages:
        raise RequestError("a chat needs messages", expected='[{"role": "user", "content": "..."}]')
    chat = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                "a message is an object with a role", found=shown(message),
                expected='{"role": "user", "content": "..."}',
            )  # fmt: skip
        said = {name: copy.deepcopy(value) for name, value in message.items() if value is not None}
        if (thoughts := next((said[name] for name in _REASONING if name in said), None)) is not None:
            said = {"thinking": thoughts, **said, "reasoning_content": thoughts}
        chat.append(said)
    return chat


def _checked_tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, Sequence) or not all(isinstance(one, Mapping) for one in tools):
        raise wrong_type("tools", tools, "a list of JSON schemas")
    return [dict(one) for one in tools]


class _Begun:
    """A message that ends the conversation and is to go on: it is marked, and the text cut at the mark."""

    def __init__(self, chat: list[dict[str, Any]], field: str, source: str) -> None:
        """
        Args:
            chat: whose last message gets the mark.
            field: of that message, which goes on.
            source: of the template.

        Raises:
            RequestError: if there is no text there, or the template does not read it.
        """
        said, message = repr(chat), chat[-1]
        self._mark = next(f"GOES_ON_{n}" for n in itertools.count() if f"GOES_ON_{n}" not in said)
        begun = message.get(field)
        holder, name = message, field
        if isinstance(begun, (list, tuple)):
            parts = [one for one in begun if isinstance(one, dict) and "text" in one]
            holder, name = (parts[-1], "text") if parts else ({}, "text")
        text = holder.get(name)
        if not isinstance(text, str):
            raise RequestError("the last message has no text to continue", expected=f'a text as its "{field}"')
        self._text = text
        same = [one for one in _REASONING if message.get(one) == begun] if field in _REASONING else [field]
        if not any(one in source for one in same):
            raise RequestError(f'the chat template does not read "{field}"; the last message cannot be continued')
        for one in [name] if holder is not message else same:
            holder[one] = f"{self._text}{self._mark} "

    def cut(self, text: str) -> str:
        """What stands before the mark. Where its last blank is gone the template trims the message, and the blanks
        before the mark go as well."""
        place = text.rfind(self._mark)
        if place < 0 or self._text.strip() not in text or self._mark in text[:place]:
            raise RequestError(
                "the chat template does not show the last message once, as it is; it cannot be continued"
            )
        return text[:place] if text.startswith(f"{self._mark} ", place) else text[:place].rstrip()
