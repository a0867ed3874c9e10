"""Answers in the form of OpenAI's API: whole, or in pieces as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.answers.pieces import Parser
from quantkit.errors import QuantkitError
from quantkit.jobs.openai_batch import chat_logprobs, choice_of, text_logprobs, tool_call, usage_of
from quantkit.jobs.prompt_lines import TokenTexts, call_ids, end_entries, entries_of, finish_reason, line_of
from quantkit.jobs.prompts_file import Prompt
from quantkit.json_values import printable
from quantkit.runtime.detokenizer import TextOffsets
from quantkit.runtime.request import Completion
from quantkit.serve.worker import Delta

DONE = b"data: [DONE]\n\n"
_MAX_MESSAGE = 1000  # characters


@dataclass(frozen=True)
class Answer:
    """How the answer to one request looks.

    Attributes:
        number: the request's identifier.
        model: the name that the server gives its model.
        created: in seconds since 1970.
        usage: whether pieces end with one that counts tokens.
    """

    prompt: Prompt
    texts: TokenTexts
    number: str
    model: str
    usage: bool = False
    created: int = 0
    _offsets: dict[int, TextOffsets] = field(default_factory=dict)
    _parsers: dict[int, Parser] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """All continuations."""
        ordered = sorted(completions, key=lambda one: one.sample)
        lines = [line_of(0, self.prompt, one, self.texts, key=self.number) for one in ordered]
        choices = [choice_of(line, chat=self.prompt.messages) for line in lines]
        return {**self._head(), "choices": choices, "usage": usage_of(lines)}

    def begin(self) -> Iterator[bytes]:
        """The pieces before the first token."""
        if self.prompt.messages:
            for sample in range(self.prompt.request.samples):
                yield self._event(sample, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, delta: Delta, *, first: bool) -> Iterator[bytes]:
        """The pieces for what a step added; `first` where it is the beginning of its continuation."""
        text = delta.text
        if first and self.prompt.begins_answer and not self.texts.tokenizer.byte_level:
            text = text.removeprefix(" ")
        logprobs = self._logprobs(delta)
        said = self._said(delta.sample, text, ended=delta.completion is not None)
        if logprobs is not None and not said:
            said = [{"delta": {"content": ""}} if self.prompt.messages else {"text": ""}]
        for one in said:
            yield self._event(delta.sample, {**one, "logprobs": logprobs})
            logprobs = None
        if delta.completion is not None:
            nothing: dict[str, Any] = {"delta": {}} if self.prompt.messages else {"text": ""}
            reason = finish_reason(delta.completion, called=bool(self._calls.get(delta.sample)))
            yield self._event(delta.sample, {**nothing, "finish_reason": reason})

    def _said(self, sample: int, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """What new text adds to a continuation."""
        if not self.prompt.messages:
            return [{"text": text}] if text else []
        form = self.prompt.form
        if form is None:
            return [{"delta": {"content": text}}] if text else []
        parser = self._parsers.setdefault(sample, form.parser())
        found = []
        for piece in [*parser.feed(text), *(parser.close() if ended else [])]:
            delta: dict[str, Any] = {"content": piece.content} if piece.content else {}
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            if piece.call is not None:
                place = self._calls.get(sample, 0)
                self._calls[sample] = place + 1
                identifier = call_ids(form, self.number, sample)(place)
                delta["tool_calls"] = [{"index": place, **tool_call(piece.call, identifier)}]
            found.append({"delta": delta})
        return found

    def end(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """The pieces after all continuations."""
        if self.usage:
            lines = [line_of(0, self.prompt, one, self.texts) for one in completions]
            yield _data({**self._head(stream=True), "choices": [], "usage": usage_of(lines)})
        yield DONE

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return the log-probabilities of new tokens, if requested."""
        if delta.logprobs is None:
            return None
        batch = self.prompt.batch
        assert batch is not None
        entries = entries_of(delta.token_ids, delta.logprobs, self.texts, batch)
        if self.prompt.messages:
            return chat_logprobs(entries) if entries else None
        if delta.sample not in self._offsets:
            self._offsets[delta.sample] = TextOffsets(self.texts.tokenizer, self.prompt.request.prompt)
        offsets = self._offsets[delta.sample]
        places = [offsets.add(token) for token in delta.token_ids]
        if delta.completion is not None:
            end = end_entries(delta.completion, self.texts, batch)
            entries += end
            places += [offsets.end] * len(end)
        return text_logprobs(entries, places) if entries else None

    def _event(self, sample: int, choice: dict[str, Any]) -> bytes:
        whole = {"index": sample, "logprobs": None, "finish_reason": None, **choice}
        usage = {"usage": None} if self.usage else {}
        return _data({**self._head(stream=True), "choices": [whole], **usage})

    def _head(self, *, stream: bool = False) -> dict[str, Any]:
        kind = f"chat.completion{'.chunk' if stream else ''}" if self.prompt.messages else "text_completion"
        name = "chatcmpl" if self.prompt.messages else "cmpl"
        return {"id": f"{name}-{self.number}", "object": kind, "created": self.created, "model": self.model}


def error_of(
    error: QuantkitError | str, *, kind: str = "invalid_request_error", code: str | None = None
) -> dict[str, Any]:
    """An error as JSON: on one short line, whatever the request holds."""
    if isinstance(error, QuantkitError):  # clients need not know where the model is
        error = QuantkitError(error.problem, found=error.found, expected=error.expected, hint=error.hint)
    message = printable(str(error))
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]} ..."
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def failed(error: QuantkitError) -> bytes:
    """The last piece of a stream that an error ends."""
    return _data(error_of(error, kind="server_error"))


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace") + b"\n\n"
