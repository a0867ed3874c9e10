"""What is asked of a model, checked before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quantkit.architectures.config import ModelConfig
from quantkit.errors import RequestError
from quantkit.json_values import shown

MAX_NEW_TOKENS = 100
"""Where nobody says how many."""

TokenIds = Sequence[int] | Tensor
"""A prompt as a model takes it: a list of ids, or a tensor of integers, [T] or [1, T]."""

_SHOW_HOW = "tokenizer.encode(text) gives them, and quantkit.stream(model, tokenizer, text) takes the text itself"


def prompt_ids(prompt: TokenIds) -> list[int]:
    """The ids of a prompt, whatever holds them.

    Raises:
        RequestError: if it is a text, no integers, or several prompts.
    """
    if isinstance(prompt, (str, bytes)):
        raise RequestError("the prompt is a text", found=shown(prompt), expected="token ids", hint=_SHOW_HOW)
    try:
        ids: list[Any] = list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
        if ids and all(isinstance(one, (list, tuple)) for one in ids):
            if len(ids) > 1:
                raise RequestError("one prompt at a time", found=f"{len(ids)} prompts", expected="ids [T] or [1, T]")
            (ids,) = ids
        return [operator.index(one) for one in ids]
    except TypeError as error:
        raise RequestError(
            "the prompt is no list of token ids", found=type(prompt).__name__,
            expected="integers in a list, or a tensor [T] or [1, T]", hint=_SHOW_HOW,
        ) from error  # fmt: skip


def checked_length(config: ModelConfig, ids: Sequence[int], max_new_tokens: int) -> int:
    """Tokens of a prompt and its continuation together.

    Raises:
        RequestError: if the prompt is empty, holds unknown ids, or does not fit the model's context
            together with the new tokens.
    """
    if not ids:
        raise RequestError("the prompt is empty")
    if not all(0 <= i < config.vocab_size for i in ids):
        raise RequestError(
            "the prompt holds token ids outside the vocabulary", expected=f"0 to {config.vocab_size - 1}"
        )
    if max_new_tokens < 1:
        raise RequestError("nothing to generate", found=f"{max_new_tokens} new tokens", expected="at least 1")
    length = len(ids) + max_new_tokens
    if length > config.max_context:
        raise RequestError(
            "prompt and new tokens exceed the model's context", found=length, expected=f"at most {config.max_context}",
            hint="ask for fewer with `max_new_tokens`",
        )  # fmt: skip
    return length
