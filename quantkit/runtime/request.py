"""What is asked of a model, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.architectures.config import ModelConfig
from quantkit.errors import RequestError


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
            hint="ask for fewer new tokens",
        )  # fmt: skip
    return length
