"""What models are measured on: windows of the packaged texts, the same for the gate and for `verify`."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from quantkit.data.files import gate_texts
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.formats.folder import checked_tokenizer
from quantkit.quality.measures import text_windows
from quantkit.text.tokenizer import Tokenizer

WINDOW = 256
"""Tokens in a window, or the model's context where that is shorter."""

RANDOM = "random tokens"
"""What they are called where there is no text."""

_LEAST = 2  # tokens, of which the first predicts the second
_WINDOWS = 2
_LARGE_PARAMETERS = 10**9


def measured_windows(checkpoint: Checkpoint) -> dict[str, tuple[str, Tensor]]:
    """The sha256 and windows [W, T] of each text, by its name.

    Where there is no tokenizer, or it makes no tokens of the texts, they are random tokens, the same each time,
    hashed themselves.
    """
    length = window_length(checkpoint)
    count = _count(checkpoint)
    tokenizer, _ = checked_tokenizer(checkpoint)
    if tokenizer is not None and (found := _of_texts(tokenizer, length, count)):
        return found
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(checkpoint.config.vocab_size, (count, length), generator=generator)
    return {RANDOM: (hashlib.sha256(tokens.numpy().tobytes()).hexdigest(), tokens)}


def _of_texts(tokenizer: Tokenizer, length: int, count: int) -> dict[str, tuple[str, Tensor]]:
    found = {}
    for name, text in gate_texts().items():
        windows = text_windows(tokenizer.encode(text), tokenizer.bos_id, length)[:count]
        if windows.shape[1] >= _LEAST:
            found[name] = (hashlib.sha256(text.encode()).hexdigest(), windows)
    return found


def window_length(checkpoint: Checkpoint) -> int:
    """Tokens in one window for a model."""
    return max(_LEAST, min(WINDOW, checkpoint.config.max_context))


def measured_tokens(checkpoint: Checkpoint) -> int:
    """How many tokens a model is measured on, at most."""
    return len(gate_texts()) * _count(checkpoint) * window_length(checkpoint)


def _count(checkpoint: Checkpoint) -> int:
    """Windows of each text."""
    return 1 if parameter_count(checkpoint) > _LARGE_PARAMETERS else _WINDOWS
