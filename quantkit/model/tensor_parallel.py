"""Tensor parallelism: one process's shard of a model, and where its results meet those of the others.

Attention and feed-forward of a process are complete in themselves; they meet where a linear has some of
the inputs (twice a layer), in the embedding, and in the logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.topology import row_parallel_modules
from quantkit.distributed.collectives import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    all_gather,
    vocab_parallel_embedding,
)
from quantkit.distributed.group import ProcessGroup
from quantkit.distributed.shard import CheckpointShard
from quantkit.distributed.split import split_model
from quantkit.formats.checkpoint import Checkpoint, require_runnable, schemes
from quantkit.model.decoder import Decoder


class TensorParallel:
    """A checkpoint's model shared by the processes of a group; `SINGLE` has all of it, and no method does anything.

    Attributes:
        checkpoint: this process's shard of the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, group: ProcessGroup) -> None:
        """
        Args:
            checkpoint: the same in all processes; `require_shareable` checks that.

        Raises:
            UnsupportedError: for a model known by its tensors only.
            RequestError: if so many processes cannot share the model.
        """
        require_runnable(checkpoint)
        self._group = group
        self._vocab_size = checkpoint.config.vocab_size
        self._vocab_start = 0
        self.checkpoint = checkpoint
        if group.size > 1:
            split = split_model(checkpoint.config, schemes(checkpoint), group.rank, group.size)
            self._vocab_start = split.vocab_start
            self.checkpoint = CheckpointShard(checkpoint, split)

    def embed(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """Embeddings [..., D] of tokens [...], from the rows that this process has of them."""
        if self._group.size == 1:
            return F.embedding(tokens, rows)
        return vocab_parallel_embedding(tokens, rows, self._vocab_start, self._group)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Logits [..., V] from those of the rows that this process has of the head."""
        if self._group.size == 1:
            return logits
        return all_gather(logits, self._group, self._vocab_size)

    def connect(self, module: nn.Module, prefix: str) -> None:
        """Add up what row-parallel linears give, of all whose names begin with that of `module`."""
        if self._group.size == 1:
            return
        for name in row_parallel_modules(self.checkpoint.config):
            if name.startswith(prefix):
                own = name.removeprefix(prefix)
                module.set_submodule(own, RowParallelLinear(module.get_submodule(own), self._group))

    def connect_vocabulary(self, model: Decoder) -> None:
        """Let the embedding and the head of a model, whatever multiplies by it, work with those of the others."""
        if self._group.size == 1:
            return
        own = model.ops.float_linear
        embedding = VocabParallelEmbedding(model.model.embed_tokens.weight, self._vocab_start, self._group)
        model.model.set_submodule("embed_tokens", embedding)
        if model.lm_head is not None and not isinstance(model.lm_head, nn.Linear):
            model.lm_head = ColumnParallelLinear(model.lm_head, self._group, self._vocab_size)
        model.ops = replace(model.ops, float_linear=lambda x, weight: self.gather_logits(own(x, weight)))
