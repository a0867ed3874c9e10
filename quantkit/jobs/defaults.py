"""What GPTQ takes where nothing is said; without torch, so that the command line's help can tell it."""

from __future__ import annotations

SAMPLES = 128
MOST_LENGTH = 2048
"""Tokens of a sample: the model's context, but no more than this."""
SEED = 0
ACTIVATION_MEMORY = 4 * 10**9
"""Bytes of activations in memory."""
