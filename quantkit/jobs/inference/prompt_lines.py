"""A completion of a prompt as plain values: a line of a file, or what an answer of OpenAI's API
is made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from quantkit.answers.form import AnswerForm, Parts
from quantkit.jobs.inference.openai_batch import BatchRequest, chat_message, spell_token_id
from quantkit.jobs.inference.prompts_file import Prompt
from quantkit.runtime.detokenizer import text_offsets
from quantkit.runtime.request import Completion, Logprobs
from quantkit.text.tokenizer import Tokenizer


def build_line(
    number: int,
    prompt: Prompt,
    completion: Completion,
    texts: TokenTexts,
    *,
    key: str | None = None,
) -> dict[str, Any]:
    """Build the line that is written of a completion; see
    `quantkit.jobs.inference.generate_file`. Identifiers of calls are made of `key`, by default the
    number of the prompt.
    """
    if prompt.request.echo:
        echoed = len(prompt.request.prompt)
    else:
        echoed = 0
    text = completion.text or ""
    if prompt.begins_answer and not texts.tokenizer.byte_level:
        # Sentencepiece puts a space before the first word of a text.
        text = text.removeprefix(" ")
    line: dict[str, Any] = {
        "index": number,
        **prompt.known_by,
        "sample": completion.sample,
        "text": text,
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids) - echoed,
    }
    if prompt.form is not None:
        parts = Parts()
        # The parser of streams is used here too, so that both ways give the same answer.
        parser = prompt.form.parser()
        parts.add([*parser.feed(text), *parser.close()])
        id_key = str(number) if key is None else key
        identifiers = call_ids(prompt.form, id_key, completion.sample)
        line["message"] = chat_message(parts, identifiers)
        line["finish_reason"] = finish_reason(completion, called=bool(parts.calls))
        if prompt.form.reasoning is not None:
            line["reasoning_tokens"] = prompt.form.reasoning_tokens(completion.token_ids[echoed:])
    if prompt.truncated:
        line["truncated"] = True
    if prompt.token_ids:
        line["token_ids"] = completion.token_ids
    if completion.logprobs is not None:
        line["logprobs"] = entries_of(
            completion.token_ids, completion.logprobs, texts, prompt.batch
        )
        if prompt.batch and not prompt.messages:
            # The text of a token can depend on the tokens before it.
            if prompt.request.echo:
                context = []
            else:
                context = prompt.request.prompt
            line["text_offset"] = text_offsets(texts.tokenizer, context, completion.token_ids, text)
            end = end_entries(completion, texts, prompt.batch)
            line["logprobs"] += end
            line["text_offset"] += [len(text)] * len(end)
    return line


def call_ids(form: AnswerForm, key: str, sample: int) -> Callable[[int], str]:
    """Make a function that names an answer's calls by their places; Mistral's templates require 9
    letters.
    """

    def identifier(place: int) -> str:
        # A hash instead of random numbers: the same inputs give the same bytes.
        digest = hashlib.sha256(f"{key}/{sample}/{place}".encode()).hexdigest()
        if (form.syntax or "").startswith("mistral"):
            return digest[:9]
        # As long as OpenAI's own identifiers.
        return f"call_{digest[:24]}"

    return identifier


def finish_reason(completion: Completion, *, called: bool) -> str:
    """Choose why an answer ended, with the API's reason for one that calls tools."""
    if called and completion.finish_reason == "stop":
        return "tool_calls"
    return completion.finish_reason


def entries_of(
    tokens: Sequence[int], logprobs: Logprobs, texts: TokenTexts, batch: BatchRequest | None
) -> list[dict[str, Any]]:
    """Build the entries of tokens, with their log-probabilities and those of the likeliest in
    their places; `batch` is of a request in OpenAI's format.
    """
    entries: list[dict[str, Any]] = []
    for token, logprob, top in zip(tokens, logprobs.tokens, logprobs.top, strict=True):
        entry = texts.entry(token, logprob, batch)
        alternatives: list[dict[str, Any]] = []
        for alternative, value in top.items():
            alternatives.append(texts.entry(alternative, value, batch))
        entry["top_logprobs"] = alternatives
        entries.append(entry)
    return entries


def end_entries(
    completion: Completion, texts: TokenTexts, batch: BatchRequest
) -> list[dict[str, Any]]:
    """Build the entry of the token that ended a completion; none if something else did.

    OpenAI's completions and vLLM's list this token with its log-probability. lm-eval drops the last
    entry of a prompt that it scores with one new token: without this entry it would drop a token of
    the prompt.
    """
    if completion.end_token is None or completion.end_logprobs is None:
        return []
    return entries_of([completion.end_token], completion.end_logprobs, texts, batch)


class TokenTexts(dict[int, str]):
    """The text of each single token, decoded when it is first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__({token: text for text, token in (tokenizer.special_tokens or {}).items()})
        self.tokenizer = tokenizer
        self._spelled = frozenset(self)

    def __missing__(self, token: int) -> str:
        # A tokenizer may drop the space at the start of a text. The second of two equal tokens
        # keeps it.
        alone = self.tokenizer.decode([token])
        text = self.tokenizer.decode([token, token])[len(alone) :]
        self[token] = text
        return text

    def entry(
        self, token: int, logprob: float | None, batch: BatchRequest | None
    ) -> dict[str, Any]:
        """Build the entry of a token with its log-probability, and for a request in OpenAI's format
        with its bytes.
        """
        if batch is None:
            return {"token": self[token], "token_id": token, "logprob": logprob}
        if batch.tokens_as_ids:
            text = spell_token_id(token)
        else:
            text = self[token]
        return {
            "token": text,
            "token_id": token,
            "logprob": logprob,
            "bytes": self._bytes_of(token),
        }

    def _bytes_of(self, token: int) -> list[int] | None:
        """Find the bytes that a token adds to the text; None if they depend on the tokens before
        it.
        """
        text = self[token]
        token_bytes = self.tokenizer.token_bytes
        if token_bytes is not None and token not in self._spelled:
            return list(token_bytes.of(token) or b"")
        # A tokenizer without bytes decodes a part of a character to U+FFFD.
        if "\ufffd" in text:
            return None
        return list(text.encode(errors="surrogatepass"))
