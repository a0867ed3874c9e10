"""What is asked of a model, checked before anything is computed, and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from quantkit.architectures.config import ModelConfig
from quantkit.arguments import as_whole, require_instance, token_rows
from quantkit.errors import RequestError
from quantkit.json_values import shown

if TYPE_CHECKING:
    from torch import Tensor

MAX_NEW_TOKENS = 100
"""Where nobody says how many."""

TokenIds: TypeAlias = "Sequence[int] | Tensor"
"""A prompt as a model takes it: a list of ids, or a tensor of integers, [T] or [1, T]."""

_WORTH_HAVING = 16
"""New tokens: where a prompt leaves fewer, and fewer than asked for, the prompt is too long."""

_SHOW_HOW = "tokenizer.encode(text) gives them, and quantkit.stream(model, tokenizer, text) takes the text itself"


def require_model(name: str, model: object, kinds: type | tuple[type, ...]) -> None:
    """Check for one that can be run.

    Raises:
        RequestError: for a path, the pair that `quantkit.load` gives, or anything else.
    """
    require_instance(name, model, kinds, "a model; model, tokenizer = quantkit.load(path) gives one")


def prompt_ids(prompt: TokenIds) -> list[int]:
    """The ids of a prompt, whatever holds them.

    Raises:
        RequestError: if it is a text, no integers, or several prompts.
    """
    if isinstance(prompt, (str, bytes)):
        raise RequestError("the prompt is a text", found=shown(prompt), expected="token ids", hint=_SHOW_HOW)
    try:
        rows = token_rows(prompt)
    except TypeError as error:
        raise RequestError(
            "the prompt is no list of token ids", found=type(prompt).__name__,
            expected="integers in a list, or a tensor [T] or [1, T]", hint=_SHOW_HOW,
        ) from error  # fmt: skip
    if len(rows) > 1:
        raise RequestError("one prompt at a time", found=f"{len(rows)} prompts", expected="ids [T] or [1, T]")
    return rows[0]


def checked_count(max_new_tokens: object) -> int:
    """How many tokens are wanted at most.

    Raises:
        RequestError: if that is no number, or none.
    """
    count = as_whole("max_new_tokens", max_new_tokens)
    if count < 1:
        raise RequestError("nothing to generate", found=f"{count} new tokens", expected="at least 1")
    return count


def checked_length(config: ModelConfig, ids: Sequence[int], max_new_tokens: int) -> int:
    """Tokens of a prompt and its continuation together.

    Raises:
        RequestError: if the prompt is empty, holds unknown ids, or does not fit the model's context
            together with the new tokens; if their number is none.
    """
    if not ids:
        raise RequestError("the prompt is empty")
    if not all(0 <= i < config.vocab_size for i in ids):
        raise RequestError(
            "the prompt holds token ids outside the vocabulary", expected=f"0 to {config.vocab_size - 1}"
        )
    length = len(ids) + checked_count(max_new_tokens)
    if length > config.max_context:
        room, wanted = config.max_context - len(ids), min(max_new_tokens, _WORTH_HAVING)
        raise RequestError(
            "prompt and new tokens exceed the model's context", found=length, expected=f"at most {config.max_context}",
            hint="give a shorter prompt" if room < wanted else "ask for fewer with `max_new_tokens`",
        )  # fmt: skip
    return length
