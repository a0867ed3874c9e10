"""Run a checkpoint block by block, its weights read from disk as they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.attention import causal_attention
from quantkit.model.decoder import RMSNorm
from quantkit.model.offload import offloaded_block
from quantkit.model.product import wide_product
from quantkit.model.rope import Rotary
from quantkit.model.tensor_parallel import all_logits, embedded
from quantkit.progress import Progress, silent


@dataclass(frozen=True)
class Batch:
    """Token sequences [B, T] at rising positions [T]."""

    tokens: Tensor
    positions: Tensor

    @classmethod
    def from_start(cls, tokens: Tensor) -> Batch:
        """Sequences at positions 0, 1, 2, ..."""
        return cls(tokens, torch.arange(tokens.shape[1]))


@torch.inference_mode()
def layerwise_hidden(checkpoint: Checkpoint, batches: Sequence[Batch], *, progress: Progress = silent) -> list[Tensor]:
    """Hidden states [B, T, D] after the final norm of every batch, in float32 on the CPU."""
    config = checkpoint.config
    embedding = _tensor(checkpoint, "model.embed_tokens.weight")
    states = [embedded(batch.tokens, embedding, checkpoint).float() for batch in batches]
    del embedding
    rotary = Rotary(config)
    angles = [rotary(batch.positions) for batch in batches]
    attends = [causal_attention(batch.positions, config.windows) for batch in batches]
    for layer in range(config.num_layers):
        progress(layer, config.num_layers, f"layer {layer}")
        block = offloaded_block(checkpoint, layer)
        for index, state in enumerate(states):
            states[index] = block(state, angles[index], attends[index])
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    norm.weight = torch.nn.Parameter(_tensor(checkpoint, "model.norm.weight").float(), requires_grad=False)
    progress(config.num_layers, config.num_layers, "")
    for index, state in enumerate(states):
        states[index] = norm(state)
    return states


@torch.inference_mode()
def head_logits(checkpoint: Checkpoint, hidden: Tensor) -> Tensor:
    """Logits [N, V] of hidden states [N, D], in float32, the head taken in pieces."""
    tied = checkpoint.config.tied_embeddings
    head = checkpoint.load("model.embed_tokens.weight" if tied else "lm_head.weight")
    logits = wide_product(hidden, head)
    del head  # the largest tensor there is, and with two models at hand there are two
    return all_logits(logits, checkpoint)


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    value = checkpoint.load(name)
    assert isinstance(value, Tensor)
    return value
