"""Run decoder blocks on whole samples, from the first token, without a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from quantkit.architectures.config import ModelConfig
from quantkit.architectures.names import EMBEDDING
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.attention import make_causal_attention
from quantkit.model.decoder import scale_embeddings
from quantkit.model.load import narrow_to_floats
from quantkit.model.mixers.mixer import Step
from quantkit.model.rope import Rotary
from quantkit.model.spans import list_spans


def embed_batches(source: Checkpoint, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the first block's inputs [B, T, D], float32, for each batch of tokens [B, T]."""
    matrix = narrow_to_floats(source.load(f"{EMBEDDING}.weight"))
    for batch in batches:
        yield scale_embeddings(
            nn.functional.embedding(batch, matrix).float(), source.config.embedding_multiplier
        )


def make_sample_step(config: ModelConfig, length: int, device: torch.device) -> Step:
    """Make the step in which blocks process samples of a length."""
    positions = torch.arange(length, device=device)
    return Step(
        Rotary(config).to(device)(positions), make_causal_attention(positions, list_spans(config))
    )
