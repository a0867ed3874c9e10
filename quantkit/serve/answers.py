"""Answers in the form of OpenAI's API: whole, or in pieces as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.answers.pieces import Parser
from quantkit.base.json_values import printable
from quantkit.errors import QuantkitError
from quantkit.jobs.inference.openai_batch import (
    BatchRequest,
    chat_logprobs,
    choices_of,
    text_logprobs,
    tool_call,
    usage_of,
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
# Line ends for Python's `str.splitlines`, and so for the lines of httpx and requests, which cut an
# event there.
_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
_MAX_MESSAGE = 1000  # characters


@dataclass(frozen=True)
class Answer:
    """How the answer to one request looks.

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
        """Return the number of continuations of all prompts."""
        return sum(prompt.request.samples for prompt in self.prompts)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return all continuations."""
        lines = self._lines(completions)
        choices = choices_of(lines, chat=self._is_chat)
        return {**self._head(), "choices": choices, "usage": usage_of(lines)}

    def begin(self) -> Iterator[bytes]:
        """Yield the pieces before the first token."""
        if self._is_chat:
            for choice in range(self.num_choices):
                yield self._event(choice, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, delta: Delta) -> Iterator[bytes]:
        """Yield the pieces for what a step added to a continuation."""
        choice = delta.prompt * self._prompt.request.samples + delta.sample
        if self._prompt.request.echo and choice not in self._offsets:
            yield self._echo(choice, delta)
        text = delta.text
        if (
            self._prompt.begins_answer
            and choice not in self._with_text
            and not self.texts.tokenizer.byte_level
        ):
            text = text.removeprefix(" ")
        if delta.text:
            self._with_text.add(choice)
        logprobs = self._logprobs(choice, delta)
        said = self._said(choice, text, ended=delta.completion is not None)
        if logprobs is not None and not said:
            said = [{"delta": {"content": ""}} if self._is_chat else {"text": ""}]
        for one in said:
            yield self._event(choice, {**one, "logprobs": logprobs})
            logprobs = None
        if delta.completion is not None:
            if self._is_chat:
                nothing: dict[str, Any] = {"delta": {}}
            else:
                nothing = {"text": ""}
            reason = finish_reason(delta.completion, called=bool(self._calls.get(choice)))
            yield self._event(choice, {**nothing, "finish_reason": reason})

    def _lines(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """Return continuations as a file of prompts gets them, prompt by prompt."""
        ordered = sorted(completions, key=lambda completion: (completion.prompt, completion.sample))
        lines: list[dict[str, Any]] = []
        for one in ordered:
            lines.append(build_line(0, self.prompts[one.prompt], one, self.texts, key=self.number))
        return lines

    def _echo(self, choice: int, delta: Delta) -> bytes:
        """Return the piece with the prompt, which comes before all else of a continuation."""
        ids = self.prompts[delta.prompt].request.prompt
        tokenizer = self.texts.tokenizer
        self._offsets[choice] = offsets = TextOffsets(tokenizer, ())
        places = [offsets.add(token) for token in ids]
        logprobs = None
        if delta.prompt_logprobs is not None:
            entries = entries_of(ids, delta.prompt_logprobs, self.texts, self._batch)
            logprobs = text_logprobs(entries, places)
        text = "".join(text_pieces(tokenizer, (), ids))
        return self._event(choice, {"text": text, "logprobs": logprobs})

    def _said(self, choice: int, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """Return what new text adds to a continuation."""
        if not self._is_chat:
            return [{"text": text}] if text else []
        form = self._prompt.form
        if form is None:
            if text:
                return [{"delta": {"content": text}}]
            return []
        parser = self._parsers.setdefault(choice, form.parser())
        result = []
        for piece in [*parser.feed(text), *(parser.close() if ended else [])]:
            if piece.content:
                delta: dict[str, Any] = {"content": piece.content}
            else:
                delta = {}
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            if piece.call is not None:
                place = self._calls.get(choice, 0)
                self._calls[choice] = place + 1
                identifier = call_ids(form, self.number, choice)(place)
                delta["tool_calls"] = [{"index": place, **tool_call(piece.call, identifier)}]
            result.append({"delta": delta})
        return result

    def end(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Yield the pieces after all continuations."""
        if self.usage:
            usage = usage_of(self._lines(completions))
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
        """Return the log-probabilities of new tokens, if requested."""
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
        places = [offsets.add(token) for token in delta.token_ids]
        if delta.completion is not None:
            end = end_entries(delta.completion, self.texts, self._batch)
            entries += end
            places += [offsets.end] * len(end)
        if entries:
            return text_logprobs(entries, places)
        return None

    def _event(self, index: int, choice: dict[str, Any]) -> bytes:
        whole = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        usage = {"usage": None} if self.usage else {}
        return _data({**self._head(stream=True), "choices": [whole], **usage})

    def _head(self, *, stream: bool = False) -> dict[str, Any]:
        if self._is_chat:
            kind = f"chat.completion{'.chunk' if stream else ''}"
        else:
            kind = "text_completion"
        name = "chatcmpl" if self._is_chat else "cmpl"
        return {
            "id": f"{name}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def error_of(
    error: QuantkitError | str, *, kind: str = "invalid_request_error", code: str | None = None
) -> dict[str, Any]:
    """Return an error as JSON: on one short line, whatever the request holds, with the field
    that is wrong.
    """
    field_name = None
    if isinstance(error, QuantkitError):
        field_name = error.argument
        # Clients need not know where the model is.
        error = error.restate(path=None)
    message = printable(str(error))
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]} ..."
    return {"error": {"message": message, "type": kind, "param": field_name, "code": code}}


def encode_error_event(error: QuantkitError) -> bytes:
    """Return the last piece of a stream that an error ends."""
    return _data(error_of(error, kind="server_error"))


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def _data(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)
    return b"data: " + text.encode(errors="backslashreplace") + b"\n\n"
