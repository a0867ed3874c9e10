"""Tensor parallelism: one process's shard of a model, and where its results meet those of the
others.

Attention and feed-forward of a process are complete in themselves; they meet where a linear has
some of the inputs or an expert some of the width (twice a layer, whatever the number of experts),
where norms of queries and keys are over the whole width, in the embedding, and in the logits.

The collectives can be traced. They call the operators beneath
`torch.distributed._functional_collectives`: its functions change their names from one torch to the
next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.topology import Parameter, list_summed_modules
from quantkit.distributed.group import ProcessGroup
from quantkit.distributed.shard import CheckpointShard, Split, split_model
from quantkit.formats.checkpoint import Checkpoint, require_runnable, schemes
from quantkit.model.decoder import Attention, Decoder, RMSNorm
from quantkit.model.feed_forward import Experts
from quantkit.model.linear import embedding_rows
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of all processes' tensors, with equal bits on all of them."""
    operators = torch.ops._c10d_functional
    total: Tensor = operators.wait_tensor(operators.all_reduce(x.contiguous(), "sum", group.name))
    return total


def all_gather(x: Tensor, group: ProcessGroup, width: int) -> Tensor:
    """Return all processes' tensors [..., W] side by side, and of that the first columns: [...,
    width].
    """
    operators = torch.ops._c10d_functional
    flat = x.reshape(-1, x.shape[-1])
    stacked = operators.wait_tensor(
        operators.all_gather_into_tensor(flat.contiguous(), group.size, group.name)
    )
    joined: Tensor = stacked.view(group.size, *x.shape).movedim(0, -2).flatten(-2)
    return joined[..., :width]


class _Sum(torch.autograd.Function):
    """A sum over processes, forward and backward as requested."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, before: bool, after: bool) -> Tensor:
        """Sum in the forward pass if `before`, and the gradients in the backward pass if
        `after`.
        """
        ctx.group = group
        ctx.after = after
        if before:
            return all_reduce(x, group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_reduce(gradient, ctx.group) if ctx.after else gradient, None, None, None


def sum_outputs(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of what the processes give, each of which goes on with it: its gradient is
    whole on each of them.
    """
    result: Tensor = _Sum.apply(x, group, True, False)  # type: ignore[no-untyped-call]
    return result


def sum_gradients(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return what all processes have, and each goes on with its share of the model: its gradients
    are summed.
    """
    result: Tensor = _Sum.apply(x, group, False, True)  # type: ignore[no-untyped-call]
    return result


def sum_shares(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of what the processes give, each of which goes on with its share of the
    model.
    """
    result: Tensor = _Sum.apply(x, group, True, True)  # type: ignore[no-untyped-call]
    return result


def vocab_parallel_embedding(
    tokens: Tensor,
    look_up: Callable[[Tensor], Tensor],
    rows: int,
    first_row: int,
    group: ProcessGroup,
) -> Tensor:
    """Embeddings [..., D] of tokens [...]; `look_up` returns those of this process's rows, by their
    numbers here, of which `first_row` is the first.
    """
    own = tokens - first_row
    elsewhere = (own < 0) | (own >= rows)
    found = look_up(own.masked_fill(elsewhere, 0))
    return all_reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0), group)


class TensorParallel:
    """A checkpoint's model shared by the processes of a group; `SINGLE` has all of it, and no
    method does anything.

    The checkpoint must be the same in all processes; `require_shareable` checks that.

    Attributes:
        checkpoint: this process's shard of the checkpoint.

    Raises:
        UnsupportedError: for a model known by its tensors only.
        RequestError: if this number of processes cannot share the model.
    """

    def __init__(
        self, checkpoint: Checkpoint, group: ProcessGroup, *, trained: bool = False
    ) -> None:
        """With `trained`, what it connects has gradients; see `enter`."""
        require_runnable(checkpoint)
        self.checkpoint = checkpoint
        self._config = checkpoint.config
        self._group = group
        self._sum, self._sum_squares = (
            (sum_outputs, sum_shares) if trained else (all_reduce, all_reduce)
        )
        self._split: Split | None = None
        if group.size > 1:
            self._split = split_model(
                checkpoint.config, schemes(checkpoint), group.rank, group.size
            )
            self.checkpoint = CheckpointShard(checkpoint, self._split)

    def embed(self, tokens: Tensor, rows: Tensor | QuantTensor) -> Tensor:
        """Embeddings [..., D] of tokens [...], from the rows that this process has of them; of
        codes in float32.
        """
        look_up = partial(embedding_rows, weight=rows)
        if self._split is None:
            return look_up(tokens)
        return vocab_parallel_embedding(
            tokens, look_up, rows.shape[0], self._split.vocab_start, self._group
        )

    def enter(self, x: Tensor) -> Tensor:
        """Return what the first linears of a branch are applied to, whose gradients are those of
        all processes together.
        """
        if self._split is None:
            return x
        return sum_gradients(x, self._group)

    @property
    def head_rows(self) -> TensorSlice | None:
        """This process's rows of the head, without padding; None for all of them."""
        if self._split is None:
            return None
        return TensorSlice(0, self._split.ranges["vocab"])

    def slice_local_logits(self, logits: Tensor) -> Tensor:
        """Of logits [..., V] those of the rows that this process has of the head, without
        padding.
        """
        if self._split is None:
            return logits
        return logits[..., slice(*self._split.ranges["vocab"][0])]

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' tensors."""
        if self._split is None:
            return x
        return all_reduce(x, self._group)

    def part(self, parameter: Parameter) -> TensorSlice | None:
        """This process's slice of a tensor; None for all of it."""
        if self._split is None:
            return None
        return self._split.tensor_slice(parameter)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Logits [..., V] from those of the rows that this process has of the head, with padding
        or without.
        """
        if self._split is None:
            return logits
        padded = F.pad(logits, (0, self._split.vocab_rows - logits.shape[-1]))
        return all_gather(padded, self._group, self._config.vocab_size)

    def connect(self, module: nn.Module, prefix: str) -> None:
        """Add up what row-parallel linears and mixtures of experts give, of all whose names begin
        with that of `module`, and what norms over the whole width of queries and keys need.
        """
        if self._split is None:
            return
        add_up = partial(self._sum, group=self._group)
        for name in list_summed_modules(self._config):
            if not name.startswith(prefix):
                continue
            part = module.get_submodule(own := name.removeprefix(prefix))
            if isinstance(part, Experts):
                part.sum = add_up
            else:
                module.set_submodule(own, ParallelLinear(part, add_up))
        if self._config.qk_norm == "width":
            heads = self._config.num_heads
            kv_heads = self._config.num_kv_heads
            size = self._config.head_dim
            widths = heads * size, kv_heads * size
            for attention in [part for part in module.modules() if isinstance(part, Attention)]:
                assert attention.q_norm is not None and attention.k_norm is not None
                attention.shared_norms = WidthParallelNorms(
                    attention.q_norm,
                    attention.k_norm,
                    widths,
                    self._split.kv_shares,
                    partial(self._sum_squares, group=self._group),
                )

    def connect_vocabulary(self, model: Decoder) -> None:
        """Let the embedding and the head of a model, whatever multiplies by it, work with those
        of the others.
        """
        if self._split is None:
            return
        own = model.ops.float_linear
        rows = self._split.vocab_rows
        embedding = VocabParallelEmbedding(
            model.model.embed_tokens, rows, self._split.vocab_start, self._group
        )
        model.model.set_submodule("embed_tokens", embedding)
        if model.lm_head is not None and not isinstance(model.lm_head, nn.Linear):
            model.lm_head = ParallelLinear(model.lm_head, self.gather_logits)
        model.ops = replace(
            model.ops, float_linear=lambda x, weight: self.gather_logits(own(x, weight))
        )


class ParallelLinear(nn.Module):
    """A linear of which each process has the columns of some inputs, or the rows of some outputs;
    `finish` makes the whole result of the processes' parts.
    """

    def __init__(self, shard: nn.Module, finish: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shard = shard
        self.finish = finish

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.shard(x))


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each process has some rows, those of `own` [R, D], from `first_row`
    on.
    """

    def __init__(self, shard: nn.Module, rows: int, first_row: int, group: ProcessGroup) -> None:
        super().__init__()
        self.shard = shard
        self.rows = rows
        self.first_row = first_row
        self.group = group

    @property
    def weight(self) -> Tensor:
        """Return its rows, where they are floats; a tied head multiplies by them."""
        result = self.shard.weight
        assert isinstance(result, Tensor)
        return result

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_parallel_embedding(tokens, self.shard, self.rows, self.first_row, self.group)


class WidthParallelNorms(nn.Module):
    """Norms of queries and keys over their whole widths, of which each process has some heads.

    Args:
        widths: of all queries and of all keys of a token.
        kv_shares: for each of this process's KV heads, what counts of it: others may have it as
            well.
        add_up: gives the sum over all processes.
    """

    def __init__(
        self,
        queries: RMSNorm,
        keys: RMSNorm,
        widths: Sequence[int],
        kv_shares: Sequence[float],
        add_up: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.queries = queries
        self.keys = keys
        self.add_up = add_up
        self._widths, self._kv_shares = tuple(widths), tuple(kv_shares)

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Normed queries [..., Q] and keys [..., K]."""
        heads = torch.unflatten(keys.float(), -1, (len(self._kv_shares), -1)).square().sum(-1)
        own = queries.float().square().sum(-1), (heads * heads.new_tensor(self._kv_shares)).sum(-1)
        squares = self.add_up(torch.stack(own, dim=-1))
        of_queries, of_keys = squares.unsqueeze(-2).unbind(-1)
        queries = self.queries.normalize_by_mean_square(queries, of_queries / self._widths[0])
        return queries, self.keys.normalize_by_mean_square(keys, of_keys / self._widths[1])
