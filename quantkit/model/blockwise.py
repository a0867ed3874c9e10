"""Run a checkpoint one decoder block at a time, so that no more than one is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import RMSNorm, causal_mask
from quantkit.model.load import load_block
from quantkit.model.rope import Rotary
from quantkit.progress import Progress, silent
from quantkit.qtensor import float_rows, row_chunks


@dataclass(frozen=True)
class Batch:
    """Token sequences [B, T] at positions [T]."""

    tokens: Tensor
    positions: Tensor

    @classmethod
    def from_start(cls, tokens: Tensor) -> Batch:
        """Sequences at positions 0, 1, 2, ..."""
        return cls(tokens, torch.arange(tokens.shape[1]))


@torch.inference_mode()
def blockwise_hidden(checkpoint: Checkpoint, batches: Sequence[Batch], *, progress: Progress = silent) -> list[Tensor]:
    """Hidden states [B, T, D] after the final norm of every batch, in float32 on the CPU."""
    config = checkpoint.config
    embedding = _tensor(checkpoint, "model.embed_tokens.weight")
    states = [F.embedding(batch.tokens, embedding).float() for batch in batches]
    del embedding
    rotary = Rotary(config)
    angles = [rotary(batch.positions) for batch in batches]
    for layer in range(config.num_layers):
        progress(layer, config.num_layers, f"layer {layer}")
        block = load_block(checkpoint, layer, dtype=torch.float32)
        for index, batch in enumerate(batches):
            mask = causal_mask(batch.positions, batch.positions, config.windows[layer])
            states[index] = block(states[index], batch.positions, angles[index], mask, None)
        del block
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    norm.weight = torch.nn.Parameter(_tensor(checkpoint, "model.norm.weight").float(), requires_grad=False)
    progress(config.num_layers, config.num_layers, "")
    return [norm(state) for state in states]


@torch.inference_mode()
def head_logits(checkpoint: Checkpoint, hidden: Tensor) -> Tensor:
    """Logits [N, V] of hidden states [N, D], in float32, the head taken in pieces."""
    tied = checkpoint.config.tied_embeddings
    head = checkpoint.load("model.embed_tokens.weight" if tied else "lm_head.weight")
    rows, columns = head.shape
    logits = torch.empty(hidden.shape[0], rows)
    for start, stop in row_chunks(rows, columns):
        torch.mm(hidden, float_rows(head, start, stop).t(), out=logits[:, start:stop])
    return logits


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    value = checkpoint.load(name)
    assert isinstance(value, Tensor)
    return value
