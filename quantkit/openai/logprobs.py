"""Log-probabilities of tokens in the forms of the chat completions and the completions API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.runtime.request import Completion, Logprobs
from quantkit.runtime.token_texts import TokenTexts


@dataclass(frozen=True)
class TokenNames:
    """Names tokens by their texts or their ids.

    Attributes:
        as_ids: whether every token is named by its id.
    """

    texts: TokenTexts
    as_ids: bool = False

    def get_name(self, token: int) -> str:
        """Return the name of a token."""
        if self.as_ids:
            return spell_token_id(token)
        return self.texts[token]


def spell_token_id(token: int) -> str:
    """Spell a name of a token that no other token has, as vLLM does."""
    return f"token_id:{token}"


def build_chat_logprobs(
    tokens: Sequence[int], logprobs: Logprobs, names: TokenNames
) -> dict[str, Any]:
    """Convert log-probabilities of an answer's tokens to the form of the chat API."""
    content: list[dict[str, Any]] = []
    for token, logprob, top in zip(tokens, logprobs.tokens, logprobs.top, strict=True):
        alternatives: list[dict[str, Any]] = []
        for alternative, value in top.items():
            alternatives.append(_build_entry(alternative, value, names))
        entry = _build_entry(token, logprob, names)
        content.append({**entry, "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def build_text_logprobs(
    tokens: Sequence[int], logprobs: Logprobs, offsets: Sequence[int], names: TokenNames
) -> dict[str, Any]:
    """Convert log-probabilities of a text's tokens, and where each begins, to the form of the
    completions API.
    """
    token_names: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []
    for token, logprob, top in zip(tokens, logprobs.tokens, logprobs.top, strict=True):
        token_names.append(names.get_name(token))
        top_logprobs.append(_map_names(token, logprob, top, names))
    return {
        "tokens": token_names,
        "token_logprobs": list(logprobs.tokens),
        "top_logprobs": top_logprobs,
        "text_offset": list(offsets),
    }


def append_end_token(
    tokens: Sequence[int], logprobs: Logprobs, completion: Completion
) -> tuple[list[int], Logprobs]:
    """Append the token that ended a completion, if a token did, to the last tokens of it.

    OpenAI's completions and vLLM's list this token with its log-probability. lm-eval drops the last
    entry of a prompt that it scores with one new token: without this entry it would drop a token of
    the prompt.
    """
    # A stop string or the maximum number of tokens may have ended it.
    end_token = completion.end_token
    end_logprobs = completion.end_logprobs
    if end_token is None or end_logprobs is None:
        return list(tokens), logprobs
    extended = Logprobs(
        [*logprobs.tokens, *end_logprobs.tokens], [*logprobs.top, *end_logprobs.top]
    )
    return [*tokens, end_token], extended


def _build_entry(token: int, logprob: float | None, names: TokenNames) -> dict[str, Any]:
    """Build the entry of a token in the form of the chat API."""
    return {
        "token": names.get_name(token),
        "logprob": logprob,
        "bytes": names.texts.find_bytes(token),
    }


def _map_names(
    token: int, logprob: float | None, top: Mapping[int, float], names: TokenNames
) -> dict[str, float] | None:
    """Map the names of a token and of the likeliest tokens in its place to their log-probabilities.

    Several tokens can have the same text: each part of a character is U+FFFD. The token itself
    keeps its text, so that clients find its value under it; others are then named by their ids.
    """
    # The first token of a prompt, which nothing predicts.
    if logprob is None:
        return None
    values = {names.get_name(token): logprob}
    for alternative, alternative_logprob in top.items():
        if alternative == token:
            continue
        name = names.get_name(alternative)
        if name in values:
            name = spell_token_id(alternative)
        values[name] = alternative_logprob
    return values
