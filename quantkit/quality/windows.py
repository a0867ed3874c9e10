"""The windows of the packaged texts on which the gate and `verify` measure models."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from quantkit.data.files import gate_texts
from quantkit.formats.checkpoint import Checkpoint, parameter_count
from quantkit.formats.folder import checked_tokenizer
from quantkit.quality.measures import text_windows

WINDOW = 256
"""Tokens in a window, or the model's context where that is shorter."""

RANDOM = "random tokens"
"""The name of windows that are not from a text."""

_MIN_TOKENS = 2  # the first predicts the second
_WINDOWS = 2
_LARGE_PARAMETERS = 10**9


def measured_windows(checkpoint: Checkpoint) -> dict[str, tuple[str, Tensor]]:
    """The sha256 and windows [W, T] of each text, by its name.

    Without a tokenizer, or if it makes no tokens of the texts, they are random tokens, the same each time, with their
    own hash.
    """
    length = window_length(checkpoint)
    count = _count(checkpoint)
    tokenizer, _ = checked_tokenizer(checkpoint)
    if tokenizer is not None:
        found = {}
        for name, text in gate_texts().items():
            windows = text_windows(tokenizer.encode(text), tokenizer.bos_id, length)[:count]
            if windows.shape[1] >= _MIN_TOKENS:
                found[name] = (hashlib.sha256(text.encode()).hexdigest(), windows)
        if found:
            return found
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(checkpoint.config.vocab_size, (count, length), generator=generator)
    return {RANDOM: (hashlib.sha256(tokens.numpy().tobytes()).hexdigest(), tokens)}


def window_length(checkpoint: Checkpoint) -> int:
    """Tokens in one window for a model."""
    return max(_MIN_TOKENS, min(WINDOW, checkpoint.config.max_context))


def measured_tokens(checkpoint: Checkpoint) -> int:
    """The most tokens that a model is measured on."""
    return len(gate_texts()) * _count(checkpoint) * window_length(checkpoint)


def _count(checkpoint: Checkpoint) -> int:
    """Windows of each text."""
    return 1 if parameter_count(checkpoint) > _LARGE_PARAMETERS else _WINDOWS
