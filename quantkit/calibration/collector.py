"""Documents from rows: the column that has them, conversations rendered, cut after a number of
bytes.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.base.json_values import format_value
from quantkit.base.messages import Message, Option
from quantkit.calibration.conversations import (
    TEMPLATE_SECONDS,
    ModelChat,
    looks_serialized,
    read_messages,
    read_tools,
    render_conversation,
)
from quantkit.errors import CheckpointError, RequestError
from quantkit.text.chat import TemplateChat
from quantkit.text.template_process import Budget

COLUMNS = ("text", "messages", "conversations")
"""Columns or keys that have the documents, unless one is named."""
TOOLS = "tools"
"""The column or key with the tools that a conversation may call."""
_MESSAGE_COLUMNS = ("messages", "conversations")
_SEPARATOR = b"\n\n"


@dataclass(frozen=True)
class DocumentText:
    """The text of a source.

    Attributes:
        text: all documents, cut at the limit.
        sha256: of the file, or of `text` if there is no file.
        source: the name of a dataset on a hub.
        documents: one by one; None for plain text.
        specials: whether the text spells special tokens, as a chat template does.
        notes: for the user.
    """

    text: str
    sha256: str
    source: str | None = None
    documents: tuple[str, ...] | None = None
    specials: bool = False
    notes: tuple[str, ...] = ()


class Collector:
    """Takes the documents from the rows of one source."""

    def __init__(
        self, path: str | Path, limit: int, column: str | None, chat: ModelChat | None
    ) -> None:
        """
        Args:
            path: of the source, for messages.
            limit: bytes of text, after which no more rows are read.
            column: has the documents; None is the first of `COLUMNS`, or the only one of strings.
            chat: renders conversations; None for a base model.
        """
        self._path = path
        self._limit = limit
        self._chat_of = chat
        self._requested = column
        self._candidates: tuple[str, ...] = COLUMNS if column is None else (column,)
        self._is_column_chosen = column is not None
        self._chat: TemplateChat | None = None
        # None before the first conversation.
        self._specials: bool | None = None
        self._budget = Budget(TEMPLATE_SECONDS, sys.maxsize, repeatable=True)
        self._documents: list[str] = []
        self._parts: list[bytes] = []
        self._refused: list[str] = []
        self._notes: list[str] = []
        # Until the chat template has been seen to print none.
        self._prints_tools = True

    def choose_columns(self, columns: Mapping[str, bool]) -> list[str]:
        """Return the columns of a table to read: that with the documents and the
        tools of conversations.
        """
        name = self.choose_document_column(columns)
        if TOOLS in columns and name != TOOLS:
            return [name, TOOLS]
        return [name]

    def choose_document_column(self, columns: Mapping[str, bool], place: str = "the table") -> str:
        """Return the column that has the documents. Raises `RequestError` if there is none.

        Args:
            columns: by name, whether each has strings.
            place: of the row, for the error.
        """
        strings = [name for name, is_string in columns.items() if is_string]
        if (
            not self._is_column_chosen
            and len(strings) == 1
            and not any(name in columns for name in self._candidates)
        ):
            self._candidates = (strings[0],)
            self._notes.append(
                f"{self._path}: the text is taken from '{strings[0]}', the only column of strings"
            )
        self._is_column_chosen = True
        for name in self._candidates:
            if name in columns:
                return name
        found = ", ".join(columns) or "nothing"
        if self._requested is not None:
            near = difflib.get_close_matches(self._requested, columns, 1)
            raise RequestError(
                Message(
                    Option("text_column", value=self._requested), f" is not a column of {place}"
                ),
                path=self._path,
                found=found,
                hint=f"did you mean '{near[0]}'?" if near else None,
            )
        raise RequestError(
            f"the text column of {place} is unknown",
            path=self._path,
            found=found,
            expected=" or ".join(self._candidates),
            hint=Message("name the text column with ", Option("text_column")),
        )

    def collect(self, rows: Iterable[tuple[str, object]]) -> None:
        """Read rows, each with its place for messages: a string, or a mapping with the columns.

        Raises:
            RequestError: for a row without the column, or whose value is neither text nor messages;
                null counts as an empty text. Also if no conversation can be rendered.
        """
        size = 0
        for place, row in rows:
            name = None
            value = row
            tools = None
            if isinstance(row, Mapping):
                name = self.choose_document_column(
                    {key: isinstance(cell, str) for key, cell in row.items()}, place
                )
                value = row[name]
                tools = row.get(TOOLS)
            messages = read_messages(value)
            if (
                messages is None
                and name in _MESSAGE_COLUMNS
                and isinstance(value, str)
                and looks_serialized(value)
            ):
                raise RequestError(
                    f"'{name}' of {place} is a string that is not the JSON of messages",
                    path=self._path,
                    found=format_value(value),
                    expected='[{"role": "user", "content": "..."}]',
                )
            is_chat = messages is not None
            if value is None:
                document: object = ""
            else:
                document = value
            if messages is not None:
                document = self._render_conversation(messages, tools, place)
            if document is None:
                continue
            if not isinstance(document, str):
                raise RequestError(
                    f"the text of {place} is of type {type(value).__name__}", path=self._path
                )
            try:
                part = document.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"the text of {place} is not valid Unicode: {error}", path=self._path
                ) from error
            self._documents.append(document)
            self._parts += [part, b"" if is_chat and self._specials else _SEPARATOR]
            size += len(part) + len(self._parts[-1])
            if size >= self._limit:
                break
        if self._refused and not self._documents:
            raise RequestError(
                f"no conversation can be rendered: {self._refused[0]}", path=self._path
            )

    def text(self, sha256: str | None = None, source: str | None = None) -> DocumentText:
        """Return all that was collected; without a `sha256`, with that of the text."""
        text = decode_utf8(b"".join(self._parts[:-1])[: self._limit], whole=False)
        notes = list(self._notes)
        if self._refused:
            count = len(self._refused) + len(self._documents)
            notes.append(
                f"{self._path}: {len(self._refused)} of {count} documents are skipped,"
                f" because the chat template cannot render them: {self._refused[0]}"
            )
        digest = sha256 or hashlib.sha256(text.encode()).hexdigest()
        return DocumentText(
            text=text,
            sha256=digest,
            source=source,
            documents=tuple(self._documents),
            specials=bool(self._specials),
            notes=tuple(notes),
        )

    def _render_conversation(
        self, messages: Sequence[Mapping[str, object]], tools: object, place: str
    ) -> str | None:
        """Return the text of a conversation; None if it cannot be rendered."""
        if self._specials is None:
            self._chat, notes = self._chat_of() if self._chat_of else (None, [])
            self._specials = self._chat is not None
            if self._chat is None:
                notes = notes or [
                    f"{self._path}: the model has no chat template; conversations are used as plain"
                    " text"
                ]
            self._notes += notes
        try:
            text = self._render_with_tools(messages, read_tools(tools))
        except (RequestError, CheckpointError) as error:
            # What is rendered in time depends on the machine.
            if self._budget.spent:
                problem = (
                    f"rendering the conversations with the chat template takes more than"
                    f" {TEMPLATE_SECONDS:g} seconds"
                )
                raise RequestError(
                    problem,
                    path=self._path,
                    hint="use fewer or shorter conversations, or plain text",
                ) from error
            self._refused.append(f"{place}: {error.problem}")
            return None
        if self._chat:
            return text.removeprefix(self._chat.start)
        return text

    def _render_with_tools(
        self,
        messages: Sequence[Mapping[str, object]],
        schemas: Sequence[Mapping[str, object]] | None,
    ) -> str:
        """Render a conversation; leave its tools out, with a note, if the template prints none."""
        try:
            return render_conversation(messages, self._chat, self._budget, schemas)
        except RequestError as error:
            if schemas is None or error.argument != "tools":
                raise
            text = render_conversation(messages, self._chat, self._budget)
        if self._prints_tools:
            self._prints_tools = False
            self._notes.append(
                f"{self._path}: the model's chat template prints no tools: they are left out"
            )
        return text


def decode_utf8(raw: bytes | bytearray, *, whole: bool) -> str:
    """Return the text of UTF-8 bytes; unless `whole`, a last character that was cut is left out."""
    return codecs.getincrementaldecoder("utf-8")().decode(raw, final=whole)
