"""A completion of a prompt as plain values: a line of a file, or what an answer of OpenAI's API is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from quantkit.answers.form import AnswerForm, Parts
from quantkit.jobs.openai_batch import chat_message
from quantkit.jobs.prompts_file import Prompt
from quantkit.runtime.detokenizer import text_offsets
from quantkit.runtime.request import Completion, Logprobs
from quantkit.text.tokenizer import Tokenizer


def line_of(
    number: int, prompt: Prompt, found: Completion, texts: TokenTexts, *, key: str | None = None
) -> dict[str, Any]:
    """What is written of a completion; see `quantkit.jobs.generate_file`. Identifiers of calls are made of `key`, by
    default the number of the prompt."""
    echoed = len(prompt.request.prompt) if prompt.request.echo else 0
    text = found.text or ""
    if prompt.begins_answer and not texts.tokenizer.byte_level:
        text = text.removeprefix(" ")  # sentencepiece puts it before a word
    line: dict[str, Any] = {
        "index": number, **prompt.known_by, "sample": found.sample, "text": text,
        "finish_reason": found.finish_reason, "stop": found.stop, "prompt_tokens": found.prompt_tokens,
        "completion_tokens": len(found.token_ids) - echoed,
    }  # fmt: skip
    if prompt.form is not None:
        parts, parser = Parts(), prompt.form.parser()
        parts.add([*parser.feed(text), *parser.close()])
        identifiers = call_ids(prompt.form, str(number) if key is None else key, found.sample)
        line["message"] = chat_message(parts, identifiers)
        line["finish_reason"] = finish_reason(found, called=bool(parts.calls))
        if prompt.form.reasoning is not None:
            line["reasoning_tokens"] = prompt.form.reasoning_tokens(found.token_ids[echoed:])
    if prompt.truncated:
        line["truncated"] = True
    if prompt.token_ids:
        line["token_ids"] = found.token_ids
    if found.logprobs is not None:
        line["logprobs"] = entries_of(found.token_ids, found.logprobs, texts)
        if prompt.batch and not prompt.messages:
            before = [] if prompt.request.echo else prompt.request.prompt
            line["text_offset"] = text_offsets(texts.tokenizer, before, found.token_ids, text)
    return line


def call_ids(form: AnswerForm, key: str, sample: int) -> Callable[[int], str]:
    """Identifiers of an answer's calls, by their places; Mistral's templates require 9 letters."""

    def identifier(place: int) -> str:
        found = hashlib.sha256(f"{key}/{sample}/{place}".encode()).hexdigest()
        return found[:9] if (form.syntax or "").startswith("mistral") else f"call_{found[:24]}"

    return identifier


def finish_reason(found: Completion, *, called: bool) -> str:
    """Why an answer ended, with the API's reason for one that calls tools."""
    return "tool_calls" if called and found.finish_reason == "stop" else found.finish_reason


def entries_of(tokens: Sequence[int], logprobs: Logprobs, texts: TokenTexts) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, and those of the likeliest in their places."""
    return [
        {**texts.entry(token, value), "top_logprobs": [texts.entry(*one) for one in top.items()]}
        for token, value, top in zip(tokens, logprobs.tokens, logprobs.top, strict=True)
    ]


class TokenTexts(dict[int, str]):
    """The text of each single token, decoded when it is first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__({token: text for text, token in (tokenizer.special_tokens or {}).items()})
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        alone = self.tokenizer.decode([token])
        text = self[token] = self.tokenizer.decode([token, token])[len(alone) :]  # it keeps the space before it
        return text

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """A token with its log-probability."""
        return {"token": self[token], "token_id": token, "logprob": logprob}
