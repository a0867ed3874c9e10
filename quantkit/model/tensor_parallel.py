"""Put the collectives of tensor parallelism into a model that was filled with one process's slices.

Attention and feed-forward of a process are complete in themselves; they meet where a linear has some of
the inputs (twice a layer), in the embedding, and in the logits.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.topology import row_parallel_modules
from quantkit.distributed.collectives import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gathered,
    looked_up,
)
from quantkit.distributed.sharded import Sharded
from quantkit.formats.checkpoint import Checkpoint
from quantkit.model.decoder import Decoder


def connect_blocks(module: nn.Module, checkpoint: Sharded, prefix: str) -> None:
    """Add up what row-parallel linears give, of all whose names begin with that of `module`."""
    for name in row_parallel_modules(checkpoint.config):
        if name.startswith(prefix):
            own = name.removeprefix(prefix)
            module.set_submodule(own, RowParallelLinear(module.get_submodule(own), checkpoint.group))


def embedded(tokens: Tensor, rows: Tensor, checkpoint: Checkpoint) -> Tensor:
    """Embeddings [..., D] of tokens [...], from the rows that this process has of them."""
    if isinstance(checkpoint, Sharded):
        return looked_up(tokens, rows, checkpoint.first_row, checkpoint.group)
    return F.embedding(tokens, rows)


def all_logits(logits: Tensor, checkpoint: Checkpoint) -> Tensor:
    """Logits [..., V] from those of the rows that this process has of the head."""
    if isinstance(checkpoint, Sharded):
        return gathered(logits, checkpoint.group, checkpoint.config.vocab_size)
    return logits


def connect_ends(model: Decoder, checkpoint: Sharded) -> None:
    """Let the embedding and the head of a model, whatever multiplies by it, work with those of the others."""
    group, width, own = checkpoint.group, checkpoint.config.vocab_size, model.linear
    embedding = VocabParallelEmbedding(model.model.embed_tokens.weight, checkpoint.first_row, group)
    model.model.set_submodule("embed_tokens", embedding)
    if model.lm_head is not None and not isinstance(model.lm_head, nn.Linear):
        model.lm_head = ColumnParallelLinear(model.lm_head, group, width)

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return gathered(own(x, weight), group, width)

    model.linear = linear
