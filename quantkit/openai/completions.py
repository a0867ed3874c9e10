"""Completions: requests with one or several prompts, and choices of their continuations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.errors import RequestError
from quantkit.openai.fields import parse_shared_fields
from quantkit.openai.logprobs import TokenNames, append_end_token, build_text_logprobs
from quantkit.openai.request import COMPLETIONS, ApiRequest
from quantkit.prompts.prompt import Prompt, PromptFields, PromptKind
from quantkit.runtime.detokenizer import text_offsets
from quantkit.runtime.request import Completion

MAX_PROMPTS = 1024
"""The maximum number of prompts in one request; OpenAI's API and vLLM state none."""

_OPTION_FIELDS = {"logprobs", "echo"}


def parse_completion(body: Mapping[str, Any]) -> ApiRequest:
    """Parse a request of the completions API.

    Raises:
        RequestError: for a field of the wrong type, one that is not supported, and too many
            prompts.
    """
    fields = parse_shared_fields(body, COMPLETIONS, "prompt", {"prompt", *_OPTION_FIELDS})
    options = dict(fields.options)
    for key in _OPTION_FIELDS & fields.values.keys():
        options[key] = fields.values[key]
    values = _split_prompts(fields.values["prompt"])
    prompts: list[PromptFields] = []
    for number, value in enumerate(values):
        # Anything but a list has to be a text, which the builder checks.
        kind: PromptKind = "prompt"
        if isinstance(value, list):
            kind = "token_ids"
        prompt = PromptFields(
            kind=kind,
            value=value,
            options=options,
            place=number if len(values) > 1 else None,
            grammar=fields.grammar,
        )
        prompts.append(prompt)
    return ApiRequest(
        path=COMPLETIONS,
        model=fields.model,
        prompts=prompts,
        names={**fields.names, "token_ids": "prompt"},
        tokens_as_ids=fields.tokens_as_ids,
    )


def _split_prompts(value: object) -> list[object]:
    """Split the field with the prompts: a text, token ids, or a list of these."""
    if not isinstance(value, list):
        return [value]
    # `isinstance` would accept booleans.
    if all(type(part) is int for part in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            "'prompt' has too many prompts",
            found=len(value),
            expected=f"at most {MAX_PROMPTS}",
            argument="prompt",
        )
    return value


def build_text_choice(
    index: int, prompt: Prompt, completion: Completion, names: TokenNames
) -> dict[str, Any]:
    """Build a choice of a completion.

    Args:
        index: of the choice.
        names: of tokens in log-probabilities.
    """
    tokenizer = names.texts.tokenizer
    text = prompt.read_text(completion, tokenizer)
    logprobs = None
    if completion.logprobs is not None:
        # The text of a token can depend on the tokens before it.
        if prompt.request.echo:
            context = []
        else:
            context = prompt.request.prompt
        offsets = text_offsets(tokenizer, context, completion.token_ids, text)
        tokens, token_logprobs = append_end_token(
            completion.token_ids, completion.logprobs, completion
        )
        # The end token has no text.
        offsets += [len(text)] * (len(tokens) - len(offsets))
        logprobs = build_text_logprobs(tokens, token_logprobs, offsets, names)
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }
