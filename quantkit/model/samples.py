"""Run decoder blocks on whole samples, from the first token, without a cache."""

from __future__ import annotations

import torch

from quantkit.architectures.config import ModelConfig
from quantkit.model.attention import make_causal_attention
from quantkit.model.mixers.mixer import Step
from quantkit.model.rope import Rotary
from quantkit.model.spans import list_spans


def make_sample_step(config: ModelConfig, length: int, device: torch.device) -> Step:
    """Make the step in which blocks process samples of a length."""
    positions = torch.arange(length, device=device)
    return Step(
        Rotary(config).to(device)(positions), make_causal_attention(positions, list_spans(config))
    )
