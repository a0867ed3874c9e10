"""Run a checkpoint block by block, its weights read from disk as they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.distributed.group import SINGLE, ProcessGroup
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.attention import causal_attention
from quantkit.model.decoder import RMSNorm
from quantkit.model.load import BLOCK_PREFIX
from quantkit.model.offload import offloaded_block
from quantkit.model.product import wide_product
from quantkit.model.rope import Rotary
from quantkit.model.tensor_parallel import TensorParallel
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
def layerwise_hidden(
    checkpoint: Checkpoint, batches: Sequence[Batch], *, group: ProcessGroup = SINGLE, progress: Progress = silent
) -> list[Tensor]:
    """Hidden states [B, T, D] after the final norm of every batch, in float32 on the CPU.

    Args:
        group: the processes that share the model; each calls this alike and gets the same.

    Raises:
        RequestError: if so many processes cannot share the model.
    """
    tp = TensorParallel(checkpoint, group)
    checkpoint, config = tp.checkpoint, tp.checkpoint.config
    embedding = _tensor(checkpoint, "model.embed_tokens.weight")
    states = [tp.embed(batch.tokens, embedding).float() for batch in batches]
    del embedding
    rotary = Rotary(config)
    angles = [rotary(batch.positions) for batch in batches]
    attends = [causal_attention(batch.positions, config.windows) for batch in batches]
    for layer in range(config.num_layers):
        progress(layer, config.num_layers, f"layer {layer}")
        block = offloaded_block(checkpoint, layer)
        tp.connect(block, BLOCK_PREFIX.format(layer))
        for index, state in enumerate(states):
            states[index] = block(state, angles[index], attends[index])
    norm = RMSNorm(config.hidden_size, config.norm_eps)
    norm.weight = torch.nn.Parameter(_tensor(checkpoint, "model.norm.weight").float(), requires_grad=False)
    progress(config.num_layers, config.num_layers, "")
    for index, state in enumerate(states):
        states[index] = norm(state)
    return states


@torch.inference_mode()
def head_logits(checkpoint: Checkpoint, hidden: Tensor, *, group: ProcessGroup = SINGLE) -> Tensor:
    """Logits [N, V] of hidden states [N, D], in float32, the head taken in pieces; `group` as in `layerwise_hidden`."""
    tp = TensorParallel(checkpoint, group)
    tied = checkpoint.config.tied_embeddings
    head = tp.checkpoint.load("model.embed_tokens.weight" if tied else "lm_head.weight")
    logits = wide_product(hidden, head)
    del head  # the largest tensor there is, and with two models at hand there are two
    return tp.gather_logits(logits)


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    value = checkpoint.load(name)
    assert isinstance(value, Tensor)
    return value
