"""Tensor parallelism: one process's shard of a model, and the collectives that combine its results
with those of the others.

A process computes its part of attention and feed-forward alone. Processes communicate after
row-parallel linears and experts (twice per layer, for any number of experts), in norms over the
width of all queries or keys, in the embedding, and for the logits.

The collectives can be traced. They call the operators beneath
`torch.distributed._functional_collectives`, because its functions change their names between
versions of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.architectures.topology import Parameter, list_summed_modules
from quantkit.base.late import LateModule
from quantkit.distributed.group import ProcessGroup
from quantkit.formats.checkpoint import Checkpoint, require_runnable, schemes
from quantkit.model.decoder import Decoder
from quantkit.model.feed_forward import Experts
from quantkit.model.linear import embedding_rows
from quantkit.model.mixers.attention import Attention
from quantkit.model.norms import RMSNorm
from quantkit.tensors.qtensor import QuantTensor
from quantkit.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    from quantkit.distributed import shard as checkpoint_shard
else:
    checkpoint_shard = LateModule("quantkit.distributed.shard")


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the tensors of all processes, with equal bits on all of them."""
    operators = torch.ops._c10d_functional
    total: Tensor = operators.wait_tensor(operators.all_reduce(x.contiguous(), "sum", group.name))
    return total


def all_gather(x: Tensor, group: ProcessGroup, width: int) -> Tensor:
    """Concatenate the tensors [..., W] of all processes; keep the first columns: [..., width]."""
    operators = torch.ops._c10d_functional
    # The operator concatenates along the first dimension: [processes * N, W].
    flat = x.reshape(-1, x.shape[-1])
    stacked = operators.wait_tensor(
        operators.all_gather_into_tensor(flat.contiguous(), group.size, group.name)
    )
    joined: Tensor = stacked.view(group.size, *x.shape).movedim(0, -2).flatten(-2)
    return joined[..., :width]


class _Sum(torch.autograd.Function):
    """A sum over processes in the forward pass, the backward pass or both."""

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
        if ctx.after:
            gradient = all_reduce(gradient, ctx.group)
        # One gradient for each argument of `forward`.
        return gradient, None, None, None


def sum_outputs(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the outputs of all processes, each of which continues with the sum: its gradient is
    already complete on each process.
    """
    result: Tensor = _Sum.apply(x, group, True, False)  # type: ignore[no-untyped-call]
    return result


def sum_gradients(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the input, which is the same on all processes, and sum its gradients: each process
    continues with its shard of the model.
    """
    result: Tensor = _Sum.apply(x, group, False, True)  # type: ignore[no-untyped-call]
    return result


def sum_shares(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the outputs of all processes and also their gradients: each process continues with its
    shard of the model.
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
    """Look up embeddings [..., D] of tokens [...]. `look_up` returns rows of this process's shard
    by their index in it; the shard begins at `first_row`.
    """
    local_tokens = tokens - first_row
    elsewhere = (local_tokens < 0) | (local_tokens >= rows)
    # Exactly one process has the row of a token, and the others add zeros.
    embeddings = look_up(local_tokens.masked_fill(elsewhere, 0))
    return all_reduce(embeddings.masked_fill(elsewhere.unsqueeze(-1), 0), group)


class TensorParallel:
    """A checkpoint's model shared by the processes of a group. In the group `SINGLE`, one process
    has the complete model, and the methods change nothing.

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
        """Split the model of a checkpoint. With `trained`, the collectives have gradients; see
        `enter`.
        """
        require_runnable(checkpoint)
        self.checkpoint = checkpoint
        self._config = checkpoint.config
        self._group = group
        # Inference needs no gradients, and its graphs are traced with the plain collective.
        self._sum = sum_outputs if trained else all_reduce
        self._sum_squares = sum_shares if trained else all_reduce
        self._split: checkpoint_shard.Split | None = None
        if group.size > 1:
            self._split = checkpoint_shard.split_model(
                checkpoint.config, schemes(checkpoint), group.rank, group.size
            )
            self.checkpoint = checkpoint_shard.CheckpointShard(checkpoint, self._split)

    def embed(self, tokens: Tensor, rows: Tensor | QuantTensor) -> Tensor:
        """Look up embeddings [..., D] of tokens [...] from this process's rows; codes are
        dequantized to float32.
        """
        look_up = partial(embedding_rows, weight=rows)
        if self._split is None:
            return look_up(tokens)
        return vocab_parallel_embedding(
            tokens, look_up, rows.shape[0], self._split.vocab_start, self._group
        )

    def enter(self, x: Tensor) -> Tensor:
        """Return the inputs of a branch's first linears, whose gradients are then summed over all
        processes.
        """
        if self._split is None:
            return x
        return sum_gradients(x, self._group)

    @property
    def head_rows(self) -> TensorSlice | None:
        """Return this process's rows of the head, without padding; None for all of them."""
        if self._split is None:
            return None
        return TensorSlice(0, self._split.ranges["vocab"])

    def slice_local_logits(self, logits: Tensor) -> Tensor:
        """Select the logits of this process's head rows from [..., V], without padding."""
        if self._split is None:
            return logits
        return logits[..., slice(*self._split.ranges["vocab"][0])]

    def add_up(self, x: Tensor) -> Tensor:
        """Sum the tensors of all processes."""
        if self._split is None:
            return x
        return all_reduce(x, self._group)

    def part(self, parameter: Parameter) -> TensorSlice | None:
        """Return this process's slice of a tensor; None for all of it."""
        if self._split is None:
            return None
        return self._split.tensor_slice(parameter)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather logits [..., V] from those of each process's rows of the head, with or without
        padding.
        """
        if self._split is None:
            return logits
        # All processes must pass the same number of columns; the padding of the last is cut off.
        padded = F.pad(logits, (0, self._split.vocab_rows - logits.shape[-1]))
        return all_gather(padded, self._group, self._config.vocab_size)

    def connect(self, module: nn.Module, prefix: str) -> None:
        """Add all-reduces to the row-parallel linears and mixtures of experts in `module`, whose
        names in the model begin with `prefix`, and to norms over the width of queries and keys.
        """
        if self._split is None:
            return
        add_up = partial(self._sum, group=self._group)
        for name in list_summed_modules(self._config):
            if not name.startswith(prefix):
                continue
            local_name = name.removeprefix(prefix)
            part = module.get_submodule(local_name)
            if isinstance(part, Experts):
                # One sum of all experts, instead of one for each.
                part.all_reduce = add_up
            else:
                module.set_submodule(local_name, ParallelLinear(part, add_up))
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
        """Add collectives to the embedding of a model and to its head, for any function that
        multiplies by the head's weight.
        """
        if self._split is None:
            return
        local_linear = model.ops.float_linear
        rows = self._split.vocab_rows
        embedding = VocabParallelEmbedding(
            model.model.embed_tokens, rows, self._split.vocab_start, self._group
        )
        model.model.set_submodule("embed_tokens", embedding)
        # A head of floats, or a tied one, is multiplied by `ops.float_linear`.
        if model.lm_head is not None and not isinstance(model.lm_head, nn.Linear):
            model.lm_head = ParallelLinear(model.lm_head, self.gather_logits)
        model.ops = replace(
            model.ops, float_linear=lambda x, weight: self.gather_logits(local_linear(x, weight))
        )


class ParallelLinear(nn.Module):
    """A linear of which each process has some columns or some rows; `finish` combines the parts of
    all processes.
    """

    def __init__(self, shard: nn.Module, finish: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shard = shard
        self.finish = finish

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.shard(x))


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each process has some rows: `shard` has `rows` of them from `first_row`
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
        """Return this process's rows of floats, by which a tied head multiplies."""
        result = self.shard.weight
        assert isinstance(result, Tensor)
        return result

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_parallel_embedding(tokens, self.shard, self.rows, self.first_row, self.group)


class WidthParallelNorms(nn.Module):
    """Norms of queries and keys over the width of all heads, of which each process has some.

    Args:
        widths: of all queries and of all keys of a token.
        kv_shares: for each of this process's KV heads, one over the number of processes that have
            it.
        add_up: computes the sum over all processes.
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
        self._widths = tuple(widths)
        self._kv_shares = tuple(kv_shares)

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize queries [..., Q] and keys [..., K]."""
        query_squares = queries.float().square().sum(-1)
        heads = torch.unflatten(keys.float(), -1, (len(self._kv_shares), -1)).square().sum(-1)
        # A KV head that several processes have would otherwise count several times.
        key_squares = (heads * heads.new_tensor(self._kv_shares)).sum(-1)
        # Both sums in one all-reduce.
        squares = self.add_up(torch.stack((query_squares, key_squares), dim=-1))
        of_queries, of_keys = squares.unsqueeze(-2).unbind(-1)
        queries = self.queries.normalize_by_mean_square(queries, of_queries / self._widths[0])
        return queries, self.keys.normalize_by_mean_square(keys, of_keys / self._widths[1])
