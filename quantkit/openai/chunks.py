"""Chunks of streamed responses of the chat completions and the completions API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from quantkit.openai.chat import find_finish_reason
from quantkit.openai.logprobs import append_end_token, build_chat_logprobs, build_text_logprobs
from quantkit.openai.responses import ResponseBuilder
from quantkit.openai.tools import build_tool_call, create_call_namer
from quantkit.prompts.prompt import Prompt
from quantkit.runtime.detokenizer import TextOffsets
from quantkit.runtime.generate import text_pieces
from quantkit.runtime.request import Completion, Delta


class ResponseStream:
    """Builds the chunks of the response to one request."""

    def __init__(self, builder: ResponseBuilder, *, with_usage: bool = False) -> None:
        """`with_usage` tells whether the last chunk counts tokens."""
        self._builder = builder
        self._with_usage = with_usage
        self._choices: list[_Choice] = []
        for prompt in builder.prompts:
            for _ in range(prompt.request.samples):
                index = len(self._choices)
                if builder.request.is_chat:
                    self._choices.append(_ChatChoice(builder, prompt, index))
                else:
                    self._choices.append(_TextChoice(builder, prompt))

    @property
    def num_choices(self) -> int:
        """Count the choices of the response."""
        return self._builder.num_choices

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first token."""
        # Clients of chat completions expect the role in the first chunk of each choice.
        if self._builder.request.is_chat:
            for index in range(self.num_choices):
                yield self._build_chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunks for what a step added to a continuation."""
        # All prompts have the same options.
        samples = self._builder.prompts[0].request.samples
        index = delta.prompt * samples + delta.sample
        for piece in self._choices[index].add(delta):
            yield self._build_chunk(index, piece)

    def end(self, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        """Yield the chunks after all continuations."""
        if self._with_usage:
            usage = self._builder.count_usage(completions)
            yield {**self._builder.build_head(is_chunk=True), "choices": [], "usage": usage}

    def _build_chunk(self, index: int, piece: dict[str, Any]) -> dict[str, Any]:
        """Build the chunk with a piece of one choice; fields that it does not set are null."""
        choice = {"index": index, "logprobs": None, "finish_reason": None, **piece}
        chunk = {**self._builder.build_head(is_chunk=True), "choices": [choice]}
        # With `include_usage`, OpenAI's chunks have a null usage, but for the last one.
        if self._with_usage:
            chunk["usage"] = None
        return chunk


class _Choice(Protocol):
    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Convert what a step added to a continuation to pieces of its choice."""
        ...


class _ChatChoice:
    """A choice of a chat completion."""

    def __init__(self, builder: ResponseBuilder, prompt: Prompt, index: int) -> None:
        tokenizer = builder.texts.tokenizer
        self._names = builder.token_names
        # Sentencepiece vocabularies put a space before the first word of an answer.
        self._may_begin_with_space = prompt.begins_answer and not tokenizer.byte_level
        self._num_calls = 0
        self._parser = None
        if prompt.form is not None:
            # Each choice is a text of its own, so it has a parser of its own.
            self._parser = prompt.form.create_parser()
            self._name_call = create_call_namer(prompt.form, builder.request_id, index)

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        text = delta.text
        if text and self._may_begin_with_space:
            text = text.removeprefix(" ")
            self._may_begin_with_space = False
        pieces: list[dict[str, Any]] = []
        for content in self._split(text, is_end=delta.completion is not None):
            pieces.append({"delta": content})
        # They belong to the whole step, so only the first piece has them.
        if delta.logprobs is not None and delta.token_ids:
            logprobs = build_chat_logprobs(delta.token_ids, delta.logprobs, self._names)
            # Tokens without text, such as a part of a character, have log-probabilities too.
            pieces = pieces or [{"delta": {"content": ""}}]
            pieces[0]["logprobs"] = logprobs
        if delta.completion is not None:
            reason = find_finish_reason(delta.completion, has_calls=self._num_calls > 0)
            pieces.append({"delta": {}, "finish_reason": reason})
        return pieces

    def _split(self, text: str, *, is_end: bool) -> list[dict[str, Any]]:
        """Split new text into the deltas of content, reasoning and calls of tools."""
        if self._parser is None:
            if text:
                return [{"content": text}]
            return []
        parsed_pieces = list(self._parser.feed(text))
        # Text that looked like the beginning of a call is content if no more follows.
        if is_end:
            parsed_pieces += self._parser.close()
        deltas: list[dict[str, Any]] = []
        for piece in parsed_pieces:
            delta: dict[str, Any] = {}
            if piece.content:
                delta["content"] = piece.content
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            # A call is sent once it is complete, as only then it is known to be valid.
            if piece.call is not None:
                number = self._num_calls
                self._num_calls += 1
                call = build_tool_call(piece.call, self._name_call(number))
                delta["tool_calls"] = [{"index": number, **call}]
            deltas.append(delta)
        return deltas


class _TextChoice:
    """A choice of a completion."""

    def __init__(self, builder: ResponseBuilder, prompt: Prompt) -> None:
        self._names = builder.token_names
        self._tokenizer = builder.texts.tokenizer
        self._request = prompt.request
        # Whether the echoed prompt has been sent.
        self._has_begun = False
        # With echo, offsets count from the beginning of the prompt, because the text contains it.
        if prompt.request.echo:
            self._offsets = TextOffsets(self._tokenizer, ())
        else:
            self._offsets = TextOffsets(self._tokenizer, prompt.request.prompt)

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        if self._request.echo and not self._has_begun:
            pieces.append(self._build_echo(delta))
        self._has_begun = True
        logprobs = self._build_logprobs(delta)
        # Tokens without text, such as a part of a character, have log-probabilities too.
        if delta.text or logprobs is not None:
            pieces.append({"text": delta.text, "logprobs": logprobs})
        if delta.completion is not None:
            pieces.append({"text": "", "finish_reason": delta.completion.finish_reason})
        return pieces

    def _build_echo(self, delta: Delta) -> dict[str, Any]:
        """Build the piece with the prompt, which is the first one of a continuation."""
        tokens = self._request.prompt
        logprobs = None
        if delta.prompt_logprobs is not None:
            offsets = [self._offsets.add(token) for token in tokens]
            logprobs = build_text_logprobs(tokens, delta.prompt_logprobs, offsets, self._names)
        text = "".join(text_pieces(self._tokenizer, (), tokens))
        return {"text": text, "logprobs": logprobs}

    def _build_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Convert the log-probabilities of new tokens to JSON, if requested."""
        if delta.logprobs is None:
            return None
        offsets = [self._offsets.add(token) for token in delta.token_ids]
        tokens = delta.token_ids
        logprobs = delta.logprobs
        if delta.completion is not None:
            # OpenAI's completions list the end token too; it has no text, so it is at the end.
            tokens, logprobs = append_end_token(tokens, logprobs, delta.completion)
            offsets += [self._offsets.end] * (len(tokens) - len(offsets))
        if not tokens:
            return None
        return build_text_logprobs(tokens, logprobs, offsets, self._names)
