"""A completion of a prompt as a line of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.prompts.prompt import Prompt
from quantkit.runtime.request import Completion, Logprobs
from quantkit.runtime.token_texts import TokenTexts


def build_line(
    number: int,
    known_by: Mapping[str, Any],
    prompt: Prompt,
    completion: Completion,
    texts: TokenTexts,
) -> dict[str, Any]:
    """Build the line that is written of a completion; see
    `quantkit.jobs.inference.generate_file`.

    Args:
        number: of the prompt in its file, from 0.
        known_by: the ``id`` of the prompt, if it has one.
    """
    line: dict[str, Any] = {
        "index": number,
        **known_by,
        "sample": completion.sample,
        "text": prompt.read_text(completion, texts.tokenizer),
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(prompt.get_new_tokens(completion)),
    }
    if prompt.is_truncated:
        line["truncated"] = True
    if prompt.kind == "token_ids":
        line["token_ids"] = completion.token_ids
    if completion.logprobs is not None:
        line["logprobs"] = _build_entries(completion.token_ids, completion.logprobs, texts)
    return line


def _build_entries(
    tokens: list[int], logprobs: Logprobs, texts: TokenTexts
) -> list[dict[str, Any]]:
    """Build the entries of tokens, with their log-probabilities and those of the likeliest in
    their places.
    """
    entries: list[dict[str, Any]] = []
    for token, logprob, top in zip(tokens, logprobs.tokens, logprobs.top, strict=True):
        alternatives: list[dict[str, Any]] = []
        for alternative, value in top.items():
            alternatives.append(_build_entry(alternative, value, texts))
        entries.append({**_build_entry(token, logprob, texts), "top_logprobs": alternatives})
    return entries


def _build_entry(token: int, logprob: float | None, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts[token], "token_id": token, "logprob": logprob}
