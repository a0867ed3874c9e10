"""Answers in the form of OpenAI's API: whole, or in pieces as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.answers.pieces import Parser
from quantkit.base.json_values import spell_control_characters
from quantkit.errors import QuantkitError
from quantkit.jobs.inference.openai_batch import (
    BatchRequest,
    build_choices,
    chat_logprobs,
    count_usage,
    text_logprobs,
    tool_call,
)
from quantkit.jobs.inference.prompt_lines import (
    TokenTexts,
    build_line,
    call_ids,
    end_entries,
    entries_of,
    finish_reason,
)
from quantkit.jobs.inference.prompts_file import Prompt
from quantkit.runtime.detokenizer import TextOffsets
from quantkit.runtime.generate import text_pieces
from quantkit.runtime.request import Completion
from quantkit.serve.worker import Delta

DONE = b"data: [DONE]\n\n"
# Line ends for Python's `str.splitlines`, and so for the lines of httpx and requests, which would
# divide an event there.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
# Characters of an error: it may quote a request of any size.
_MAX_MESSAGE = 1000


@dataclass(frozen=True)
class Answer:
    """Builds the answer to one request.

    Attributes:
        prompts: one, or several that are continued in the same way.
        number: the request's identifier.
        model: the name that the server gives its model.
        created: in seconds since 1970.
        usage: whether pieces end with one that counts tokens.
    """

    prompts: Sequence[Prompt]
    texts: TokenTexts
    number: str
    model: str
    usage: bool = False
    created: int = 0
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    _parsers: dict[int, Parser] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)
    _with_text: set[int] = field(default_factory=set)

    @property
    def num_choices(self) -> int:
        """Count the continuations of all prompts."""
        return sum(prompt.request.samples for prompt in self.prompts)

    def build_complete(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Build the answer with all continuations, for a client that does not stream."""
        lines = self._lines(completions)
        choices = build_choices(lines, chat=self._is_chat)
        return {**self._head(), "choices": choices, "usage": count_usage(lines)}

    def begin(self) -> Iterator[bytes]:
        """Yield the pieces before the first token."""
        # Clients of chat completions expect the role in the first piece of each choice.
        if self._is_chat:
            for choice in range(self.num_choices):
                yield self._event(choice, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, delta: Delta) -> Iterator[bytes]:
        """Yield the pieces for what a step added to a continuation."""
        choice = delta.prompt * self._prompt.request.samples + delta.sample
        if self._prompt.request.echo and choice not in self._offsets:
            yield self._echo(choice, delta)
        text = delta.text
        is_first_text = self._prompt.begins_answer and choice not in self._with_text
        # Sentencepiece vocabularies put a space before the first word of an answer.
        if is_first_text and not self.texts.tokenizer.byte_level:
            text = text.removeprefix(" ")
        if delta.text:
            self._with_text.add(choice)
        logprobs = self._logprobs(choice, delta)
        pieces = self._said(choice, text, ended=delta.completion is not None)
        # Tokens without text, such as a part of a character, have log-probabilities too.
        if logprobs is not None and not pieces:
            pieces = [{"delta": {"content": ""}} if self._is_chat else {"text": ""}]
        for piece in pieces:
            yield self._event(choice, {**piece, "logprobs": logprobs})
            # They belong to the whole step, so only the first piece has them.
            logprobs = None
        if delta.completion is not None:
            last_piece: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            reason = finish_reason(delta.completion, called=bool(self._calls.get(choice)))
            yield self._event(choice, {**last_piece, "finish_reason": reason})

    def _lines(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """Convert continuations to lines of a prompt file's output, prompt by prompt."""
        # They arrive in the order in which they end.
        ordered = sorted(completions, key=lambda completion: (completion.prompt, completion.sample))
        lines: list[dict[str, Any]] = []
        for completion in ordered:
            prompt = self.prompts[completion.prompt]
            lines.append(build_line(0, prompt, completion, self.texts, key=self.number))
        return lines

    def _echo(self, choice: int, delta: Delta) -> bytes:
        """Build the piece with the prompt, which is the first one of a continuation."""
        ids = self.prompts[delta.prompt].request.prompt
        tokenizer = self.texts.tokenizer
        # Offsets count from the beginning of the prompt, because the text contains it.
        self._offsets[choice] = offsets = TextOffsets(tokenizer, ())
        token_offsets = [offsets.add(token) for token in ids]
        logprobs = None
        if delta.prompt_logprobs is not None:
            entries = entries_of(ids, delta.prompt_logprobs, self.texts, self._batch)
            logprobs = text_logprobs(entries, token_offsets)
        text = "".join(text_pieces(tokenizer, (), ids))
        return self._event(choice, {"text": text, "logprobs": logprobs})

    def _said(self, choice: int, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """Convert new text of a continuation to pieces: content, reasoning and calls of tools."""
        if not self._is_chat:
            return [{"text": text}] if text else []
        form = self._prompt.form
        if form is None:
            if text:
                return [{"delta": {"content": text}}]
            return []
        parser = self._parsers.setdefault(choice, form.parser())
        parsed_pieces = list(parser.feed(text))
        # Text that looked like the beginning of a call is content if no more follows.
        if ended:
            parsed_pieces += parser.close()
        deltas: list[dict[str, Any]] = []
        for piece in parsed_pieces:
            delta: dict[str, Any] = {}
            if piece.content:
                delta["content"] = piece.content
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            # A call is sent once it is complete, as only then it is known to be valid.
            if piece.call is not None:
                index = self._calls.get(choice, 0)
                self._calls[choice] = index + 1
                identifier = call_ids(form, self.number, choice)(index)
                delta["tool_calls"] = [{"index": index, **tool_call(piece.call, identifier)}]
            deltas.append({"delta": delta})
        return deltas

    def end(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Yield the pieces after all continuations."""
        if self.usage:
            usage = count_usage(self._lines(completions))
            yield _data({**self._head(stream=True), "choices": [], "usage": usage})
        yield DONE

    @property
    def _prompt(self) -> Prompt:
        """Return the first prompt, with the options of all of them."""
        return self.prompts[0]

    @property
    def _is_chat(self) -> bool:
        return self._prompt.messages

    @property
    def _batch(self) -> BatchRequest:
        assert self._prompt.batch is not None
        return self._prompt.batch

    def _logprobs(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        """Convert the log-probabilities of new tokens to JSON, if requested."""
        if delta.logprobs is None:
            return None
        entries = entries_of(delta.token_ids, delta.logprobs, self.texts, self._batch)
        if self._is_chat:
            if entries:
                return chat_logprobs(entries)
            return None
        if choice not in self._offsets:
            ids = self.prompts[delta.prompt].request.prompt
            self._offsets[choice] = TextOffsets(self.texts.tokenizer, ids)
        offsets = self._offsets[choice]
        token_offsets = [offsets.add(token) for token in delta.token_ids]
        if delta.completion is not None:
            # OpenAI's completions list the end token too; it has no text, so it is at the end.
            last_entries = end_entries(delta.completion, self.texts, self._batch)
            entries += last_entries
            token_offsets += [offsets.end] * len(last_entries)
        if entries:
            return text_logprobs(entries, token_offsets)
        return None

    def _event(self, index: int, choice: dict[str, Any]) -> bytes:
        """Encode a piece of one choice; keys that it does not set are null."""
        event_choice = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        # With `include_usage`, OpenAI's pieces have a null usage, but for the last one.
        usage = {"usage": None} if self.usage else {}
        return _data({**self._head(stream=True), "choices": [event_choice], **usage})

    def _head(self, *, stream: bool = False) -> dict[str, Any]:
        """Build the keys that the answer and all of its pieces share."""
        if self._is_chat:
            prefix = "chatcmpl"
            kind = f"chat.completion{'.chunk' if stream else ''}"
        else:
            prefix = "cmpl"
            kind = "text_completion"
        return {
            "id": f"{prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def error_to_json(
    error: QuantkitError | str, *, kind: str = "invalid_request_error", code: str | None = None
) -> dict[str, Any]:
    """Convert an error to JSON: on one short line, whatever the request contains, with the field
    that is wrong.
    """
    field_name = None
    if isinstance(error, QuantkitError):
        field_name = error.argument
        # Clients need not know where the model is.
        error = error.restate(path=None)
    message = spell_control_characters(str(error))
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]} ..."
    return {"error": {"message": message, "type": kind, "param": field_name, "code": code}}


def encode_error_event(error: QuantkitError) -> bytes:
    """Encode an error as the last piece of a stream."""
    return _data(error_to_json(error, kind="server_error"))


def now() -> int:
    """Return the seconds since 1970."""
    return int(time.time())


def _data(value: dict[str, Any]) -> bytes:
    """Encode a JSON value as a server-sent event."""
    text = json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)
    # A lone surrogate, which a template or a body may contain, has no encoding in UTF-8.
    return b"data: " + text.encode(errors="backslashreplace") + b"\n\n"
